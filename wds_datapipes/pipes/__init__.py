"""The stages: registered ``IterDataPipe`` classes that hold arguments and leave the work to ``core``.

They import ``torch.utils.data`` and never torchdata, so that they also run under ``DataLoader`` where there is no
``DataLoader2``.
"""
