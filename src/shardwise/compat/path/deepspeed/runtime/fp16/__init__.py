from . import fused_optimizer, unfused_optimizer
