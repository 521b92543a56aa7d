"""The base classes of the sections of DeepSpeed's configuration."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class DeepSpeedConfigModel(BaseModel):
    """A section. A key that is "auto" has its default; unknown ones are errors, in classes that users derive.

    Of a field whose `json_schema_extra` says `deprecated`, the value also goes to its `new_param`.
    """

    model_config = ConfigDict(extra="forbid", validate_default=True, populate_by_name=True)

    def __init__(self, strict: bool = False, **data: Any) -> None:
        super().__init__(**data)
        for name in sorted(self.model_fields_set):
            self._follow_new_name(name)

    def _follow_new_name(self, name: str) -> None:
        field = type(self).model_fields.get(name)
        details = field.json_schema_extra if field is not None else None
        if not isinstance(details, dict) or not details.get("deprecated") or not details.get("set_new_param", True):
            return
        new, convert = details.get("new_param"), details.get("new_param_fn")
        if not isinstance(new, str) or not new:
            return
        if new in self.model_fields_set:
            raise AssertionError(f"{name} is the deprecated name of {new}: give one of the two")
        value = getattr(self, name)
        setattr(self, new, convert(value) if callable(convert) else value)

    @model_validator(mode="before")
    @classmethod
    def _drop_auto(cls, data: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in data.items() if value != "auto"}


class OwnSection(DeepSpeedConfigModel):
    """A section of DeepSpeed's. Keys without a field become attributes as they are."""

    model_config = ConfigDict(extra="allow")
