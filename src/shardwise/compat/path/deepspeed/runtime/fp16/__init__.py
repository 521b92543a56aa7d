from . import fused_optimizer
