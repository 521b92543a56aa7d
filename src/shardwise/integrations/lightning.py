"""Lightning on shardwise: `Trainer(strategy=ShardwiseStrategy("zero3"))`.

Lightning starts the processes, builds optimizers and schedulers, counts micro-batches and divides the loss. The engine
is the strategy's model: training and evaluation steps run as its forward. Checkpoints are folders, which resume on any
number of processes and in any stage; those with `weights_only=True` are files of Lightning's own format.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision as LightningPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from shardwise.config import Config
from shardwise.config.sections import Precision
from shardwise.deferred.deferred import deferred_init
from shardwise.engine.engine import Engine
from shardwise.engine.initialize import initialize
from shardwise.errors import CheckpointError, ConfigError
from shardwise.integrations.detach import detach
from shardwise.integrations.settings import with_settings

_TAG = "checkpoint"  # inside the folder that Lightning names
_TRAINER = "lightning"  # what Lightning saves, in the state of that checkpoint: both are there, or neither
_PRECISIONS = {
    "32-true": None,
    "bf16-mixed": Precision(compute="bf16", autocast=True),
    "16-mixed": Precision(compute="fp16", autocast=True),
    "bf16-true": Precision(compute="bf16"),
    "16-true": Precision(compute="fp16"),
}


class ShardwiseStrategy(DDPStrategy):
    """Trains a LightningModule under a placement.

    `config` is a preset, a path, a dict or a `shardwise.Config`. `Trainer(precision=...)` sets its precision,
    `accumulate_grad_batches` its accumulation. With `deferred`, what `configure_model` builds gets its values shard by
    shard, so that no process holds the whole model. After `fit`, the module has whole values on the host, as after any
    other strategy; with `keeps_model=False` it is left empty, for models that the host cannot hold whole. Further
    arguments are those of DDPStrategy about processes: `process_group_backend`, `timeout`, `start_method`.
    """

    def __init__(
        self, config: Any = "zero3", *, deferred: bool = False, keeps_model: bool = True, **kwargs: Any
    ) -> None:
        self._config = Config.load(config)
        self._deferred = deferred
        self._keeps_model = keeps_model
        self._dtypes: dict[str, torch.dtype] = {}
        self._has_failed = False
        self._engine: Engine | None = None
        super().__init__(**kwargs)

    @property
    def engine(self) -> Engine:
        """The engine, while the trainer runs."""
        if self._engine is None:
            raise RuntimeError("ShardwiseStrategy has an engine only while the Trainer fits, validates or tests")
        return self._engine

    @property
    def precision_plugin(self) -> LightningPrecision:
        """Lightning's plugin, replaced by one that leaves casts, loss scale, clipping and steps to the engine."""
        return self._precision_plugin or EnginePrecision("32-true", self)

    @precision_plugin.setter
    def precision_plugin(self, plugin: LightningPrecision | None) -> None:
        if plugin is None or isinstance(plugin, EnginePrecision):
            self._precision_plugin = plugin
            return
        if plugin.precision not in _PRECISIONS or type(plugin).__module__.endswith("bitsandbytes"):
            raise ConfigError(
                f"ShardwiseStrategy does not train with {type(plugin).__name__} ({plugin.precision}): use "
                f"Trainer(precision=...) with one of {', '.join(_PRECISIONS)}"
            )
        self._precision_plugin = EnginePrecision(plugin.precision, self)

    def setup(self, trainer: Any) -> None:
        self.accelerator.setup(trainer)
        module = self.lightning_module
        self._has_failed = False
        if not self._deferred:
            self.model_to_device()
        self._dtypes = {name: param.dtype for name, param in module.named_parameters()}
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits:
            self.setup_optimizers(trainer)
            if len(self.optimizers) > 1:
                raise ConfigError(
                    f"configure_optimizers returns {len(self.optimizers)} optimizers, which Lightning steps one by one "
                    "and an engine together: return one, or use shardwise.initialize with a list in a loop of your own"
                )
        optimizer = self.optimizers[0] if fits and self.optimizers else None
        self._engine = initialize(module, optimizer, self._config_for(trainer))
        self._engine.set_boundary(True)
        self.model = self._engine

    def _config_for(self, trainer: Any) -> Config:
        name = self.precision_plugin.precision
        said = f"Trainer(precision={name!r})"
        return with_settings(self._config, _PRECISIONS[name], said, trainer.accumulate_grad_batches)

    def block_backward_sync(self) -> Any:
        """Around a micro-batch before the last one of a step."""
        return self._accumulating()

    @contextlib.contextmanager
    def _accumulating(self) -> Iterator[None]:
        self.engine.set_boundary(False)
        try:
            yield
            self.engine.step()
        finally:
            self.engine.set_boundary(True)

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Around `configure_model`."""
        with deferred_init(device=self.root_device) if self._deferred else contextlib.nullcontext():
            yield

    # Checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False  # the engine's checkpoint has its states

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # gathered where it is needed: see save_checkpoint

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder that training resumes from, or with `weights_only` one file. A collective."""
        filepath = Path(self.broadcast(filepath))
        if "optimizer_states" not in checkpoint:
            checkpoint["state_dict"] = self.lightning_module.state_dict()
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise CheckpointError(
                "ShardwiseStrategy writes checkpoints without a CheckpointIO plugin: leave storage_options out"
            )
        written = io.BytesIO()
        torch.save(checkpoint, written)
        state = {_TRAINER: torch.frombuffer(written.getbuffer(), dtype=torch.uint8)}
        self.engine.save(filepath, _TAG, state=state, keep=1)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """What Lightning saved; the engine continues from the folder. A collective."""
        path = Path(checkpoint_path)
        if path.is_file():
            loaded: dict[str, Any] = super().load_checkpoint(path, weights_only)
            if self._engine is not None and self._engine.optimizer is not None and loaded.get("optimizer_states"):
                raise CheckpointError(
                    f"{path} has the optimizer's states in one file, of another strategy: continue with that, or "
                    "load its weights alone with LightningModule.load_from_checkpoint"
                )
            return loaded
        state = self.engine.load(path, _TAG)
        if _TRAINER not in (state or {}):
            raise CheckpointError(
                f"{path} is not of ShardwiseStrategy: load it with shardwise.initialize(...).load() instead"
            )
        content = io.BytesIO(state[_TRAINER].numpy().tobytes())
        return dict(torch.load(content, map_location="cpu", weights_only=weights_only is not False))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if checkpoint["state_dict"]:
            super().load_model_state_dict(checkpoint, strict)

    # The end

    def on_exception(self, exception: BaseException) -> None:
        self._has_failed = True

    def teardown(self) -> None:
        engine, self._engine = self._engine, None
        module = self.lightning_module
        if engine is not None:
            self.model = module
            if self._has_failed or not self._keeps_model:
                engine.destroy()
                self._lightning_module = None  # Lightning moves its module to the host: this one is empty
            else:
                detach(engine, self._dtypes)
        super().teardown()
        self._lightning_module = module


class EnginePrecision(LightningPrecision):
    """Leaves casts, the loss scale, clipping and the update to the engine of a strategy."""

    def __init__(self, precision: str, strategy: ShardwiseStrategy) -> None:
        self.precision = precision
        self._strategy = strategy

    def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        engine = self._strategy.engine
        if engine.config.precision.compute == "fp16":
            engine.backward(tensor, scale=False)
        else:
            super().backward(tensor, model, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        result = closure()
        if result is None and model.automatic_optimization:
            return None  # training_step returned None on all ranks: nothing to update from
        self._after_closure(model, optimizer)
        self._strategy.engine.step()
        return result

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        if clip_val <= 0:
            return
        if gradient_clip_algorithm != "norm":
            raise ConfigError(
                f"gradient_clip_algorithm is {str(gradient_clip_algorithm)!r}: an engine clips by the global norm, use "
                'Trainer(gradient_clip_algorithm="norm")'
            )
        self._strategy.engine.clip_grad_norm_(clip_val)
