"""`deepspeed.monitor`: where rank 0 writes the loss and the rate of a step, by the configuration's sections.

An event is a tuple of a label, a value and a step. What writes to a service needs its package.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist

from shardwise.compat.standalone.settings import DeepSpeedMonitorConfig
from shardwise.errors import CompatibilityError

Events = Iterable[tuple[str, Any, int]]


class Monitor:
    """Writes events on rank 0, if its section is enabled. The section's keys are its attributes."""

    package: ClassVar[str | None] = None
    """What has to be installed."""

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config
        vars(self).update(vars(monitor_config))
        self._writes = monitor_config.enabled and (not dist.is_initialized() or dist.get_rank() == 0)
        package = self._imported() if monitor_config.enabled else None  # on all ranks, so that all of them raise
        if self._writes:
            self._open(package)

    def write_events(self, event_list: Events) -> None:
        if self._writes:
            for label, value, step in event_list:
                self._write(label, value, step)
            self.flush()

    def flush(self) -> None:
        """Does nothing, where each event is written at once."""

    def _imported(self) -> Any:
        if self.package is None:
            return None
        try:
            return import_module(self.package)
        except ImportError as error:
            name = type(self).__name__
            raise CompatibilityError(f"{name} needs the package {self.package}: install it, or disable it") from error

    def _open(self, package: Any) -> None:
        raise NotImplementedError

    def _write(self, label: str, value: Any, step: int) -> None:
        raise NotImplementedError


class TensorBoardMonitor(Monitor):
    """Into `output_path/job_name`."""

    package = "torch.utils.tensorboard"
    summary_writer: Any = None

    def _open(self, package: Any) -> None:
        self.summary_writer = package.SummaryWriter(
            log_dir=str(Path(self.monitor_config.output_path) / self.monitor_config.job_name)
        )

    def _write(self, label: str, value: Any, step: int) -> None:
        self.summary_writer.add_scalar(label, value, step)

    def flush(self) -> None:
        if self._writes:
            self.summary_writer.flush()


class csvMonitor(Monitor):
    """Into `output_path/job_name`, a file for each label; one that is there is appended to."""

    log_dir: Path | None = None

    def _open(self, package: Any) -> None:
        self.log_dir = Path(self.monitor_config.output_path) / self.monitor_config.job_name
        self.log_dir.mkdir(parents=True, exist_ok=True)

    def _write(self, label: str, value: Any, step: int) -> None:
        assert self.log_dir is not None
        path = self.log_dir / f"{label.replace('/', '_').replace(' ', '_')}.csv"
        with path.open("a", newline="") as file:
            rows = csv.writer(file)
            if not file.tell():
                rows.writerow(["step", label.rpartition("/")[2]])
            rows.writerow([step, value])


class WandbMonitor(Monitor):
    """Into a run of Weights & Biases."""

    package = "wandb"

    def _open(self, package: Any) -> None:
        self._wandb = package
        own = self.monitor_config
        package.init(project=own.project, group=own.group, entity=own.team)

    def log(self, data: Any, step: int | None = None, commit: bool | None = None) -> Any:
        return self._wandb.log(data, step=step, commit=commit) if self._writes else None

    def _write(self, label: str, value: Any, step: int) -> None:
        self.log({label: value}, step=step)


class CometMonitor(Monitor):
    """Into an experiment of Comet, every `samples_log_interval` samples."""

    package = "comet_ml"
    experiment: Any = None

    def _open(self, package: Any) -> None:
        names = ("api_key", "project", "workspace", "experiment_key", "mode", "online")
        self.experiment = package.start(**{name: getattr(self, name) for name in names})
        if (name := self.monitor_config.experiment_name) is not None:
            self.experiment.set_name(name)
        self._written: dict[str, int] = {}

    def _write(self, label: str, value: Any, step: int) -> None:
        if label not in self._written or step - self._written[label] >= self.monitor_config.samples_log_interval:
            self._written[label] = step
            self.experiment.log_metric(label, value, step=step)


class TrackioMonitor(Monitor):
    """Into a project of Trackio."""

    package = "trackio"

    def _open(self, package: Any) -> None:
        self._trackio = package
        package.init(project=self.monitor_config.project)

    def _write(self, label: str, value: Any, step: int) -> None:
        self._trackio.log({label: value}, step=step)


class MonitorMaster:
    """All monitors that a configuration enables; None stands for the others, and for all but on rank 0."""

    def __init__(self, monitor_config: DeepSpeedMonitorConfig) -> None:
        self.monitor_config = monitor_config
        self.enabled = monitor_config.enabled
        self.tb_monitor = self._made(TensorBoardMonitor, monitor_config.tensorboard)
        self.wandb_monitor = self._made(WandbMonitor, monitor_config.wandb)
        self.csv_monitor = self._made(csvMonitor, monitor_config.csv_monitor)
        self.comet_monitor = self._made(CometMonitor, monitor_config.comet)
        self.trackio_monitor = self._made(TrackioMonitor, monitor_config.trackio)

    def _made(self, kind: type[Monitor], section: Any) -> Any:
        monitor = kind(section)
        return monitor if monitor._writes else None

    def write_events(self, event_list: Events) -> None:
        events = list(event_list)
        for monitor in vars(self).values():
            if isinstance(monitor, Monitor):
                monitor.write_events(events)
