"""`torch.ops.bipace.*` and `torch.compile`."""

from . import registry as registry
