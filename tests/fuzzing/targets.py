"""All targets, by name."""

from __future__ import annotations

import codec_targets
import shard_targets
import sidecar_targets
import state_targets
import text_targets

MODULES = (shard_targets, sidecar_targets, state_targets, codec_targets, text_targets)
TARGETS = {target.name: target for module in MODULES for target in module.TARGETS}
