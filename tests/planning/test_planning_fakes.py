"""Remembered results equal those of torch's fake mode: the same tensors, and the same memory."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shardwise.dry_run.fakes import Fakes

CPU = torch.device("cpu")
aten = torch.ops.aten


@pytest.fixture
def fakes():
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield Fakes(mode, CPU)


def forms(result):
    """What is told of a result, tensors by all that a dry run sees of them."""
    if isinstance(result, (list, tuple)):
        return [forms(each) for each in result]
    if not isinstance(result, torch.Tensor):
        return result
    assert type(result) is FakeTensor
    storage_bytes = result.untyped_storage().nbytes()
    return result.shape, result.stride(), result.dtype, result.device, result.storage_offset(), storage_bytes


CALLS = {
    "elementwise": lambda run: run(aten.mul.Tensor, (torch.empty(4, 1, 3).mT, torch.empty(4, 1, 5)), {}),
    "number": lambda run: run(aten.add.Tensor, (torch.empty(3, dtype=torch.int64), 1.5), {}),
    "product": lambda run: run(aten.mm.default, (torch.empty(2, 3).bfloat16(), torch.empty(4, 3).bfloat16().t()), {}),
    "list": lambda run: run(aten.cat.default, ([torch.empty(2, 3), torch.empty(1, 3)], 0), {}),
    "several": lambda run: run(aten.topk.default, (torch.empty(5, 8), 2), {}),
    "factory": lambda run: run(aten.empty.memory_format, ([3, 4],), {"dtype": torch.int8, "device": CPU}),
    "copy": lambda run: run(aten._to_copy.default, (torch.empty(2, 6)[:, :3],), {"dtype": torch.float64}),
    "nothing": lambda run: run(aten._foreach_add_.Scalar, ([torch.empty(3)], 1.0), {}),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_second_answer_is_that_of_the_fake_mode(fakes, call):
    real = call(lambda func, args, kwargs: func(*args, **kwargs))
    asked = []

    def counted(func, args, kwargs):
        return fakes.run(_Counted(func, asked), args, kwargs)

    first, second = call(counted), call(counted)
    assert forms(real) == forms(first) == forms(second)
    assert len(asked) == 1


class _Counted:
    """An operator that notes its calls, equal to others of the same."""

    def __init__(self, func, calls):
        self.func, self.calls, self.is_view = func, calls, func.is_view
        self.namespace, self.tags = func.namespace, func.tags

    def __call__(self, *args, **kwargs):
        self.calls.append(args)
        return self.func(*args, **kwargs)

    def __eq__(self, other):
        return self.func is getattr(other, "func", other)

    def __hash__(self):
        return hash(self.func)


def test_each_answer_has_a_storage_of_its_own(fakes):
    x = torch.empty(3)
    made = [fakes.run(aten.neg.default, (x,), {}) for _ in range(3)]
    assert len({each.untyped_storage()._cdata for each in (x, *made)}) == 4


def test_equal_numbers_of_different_types_are_different_forms(fakes):
    x = torch.empty(3, dtype=torch.int64)
    dtypes = [fakes.run(aten.mul.Tensor, (x, number), {}).dtype for number in (1, 1.0, True)]
    assert dtypes == [torch.int64, torch.float32, torch.int64]


def test_what_is_written_to_is_what_comes_back(fakes):
    for _ in range(2):
        x, y = torch.empty(3), torch.empty(3)
        assert fakes.run(aten.add_.Tensor, (x, y), {}) is x
        assert fakes.run(aten.mul.out, (x, y), {"out": y}) is y


def test_a_result_without_room_is_resized_every_time(fakes):
    for _ in range(2):
        out = torch.empty(0)
        fakes.run(aten.mul.out, (torch.empty(3), torch.empty(3)), {"out": out})
        assert out.shape == (3,)


@pytest.mark.parametrize("func", [aten.view.default, aten._unsafe_view.default])
def test_a_view_shares_the_storage_it_is_given(fakes, func):
    for _ in range(2):
        x = torch.empty(2, 3)
        assert fakes.run(func, (x, [6]), {}).untyped_storage()._cdata == x.untyped_storage()._cdata


def test_values_that_are_known_are_not_forgotten(fakes):
    for value in (1.0, 2.0):
        known = torch.tensor(value)
        assert fakes.run(aten.add.Tensor, (known, known), {}).item() == 2 * value


def test_what_becomes_a_view_does_so_every_time(fakes):
    for _ in range(3):
        x, y = torch.empty(3), torch.empty(3)
        fakes.run(aten.set_.source_Tensor, (x, y), {})
        assert x.untyped_storage()._cdata == y.untyped_storage()._cdata


def test_an_operator_of_somebody_elses_is_asked_every_time(fakes):
    room = [1]

    @torch.library.custom_op("shardwise_tests::roomy", mutates_args=())
    def roomy(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(room[0])

    roomy.register_fake(lambda x: x.new_empty(room[0]))
    for room[0] in (3, 5):
        assert fakes.run(torch.ops.shardwise_tests.roomy.default, (torch.empty(2),), {}).shape == (room[0],)
