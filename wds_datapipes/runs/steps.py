"""The steps of a run, from `wds_datapipes.tools.runs.steps`."""

from wds_datapipes.tools.runs.steps import RunSteps as RunSteps
from wds_datapipes.tools.runs.steps import StepSample as StepSample
