from shardwise.compat.op_builder import __compatible_ops__

from . import adagrad, adam, aio, lamb, lion, op_builder
