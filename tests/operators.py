"""What torch's operators are asked for, and what autograd keeps, while something runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode


def added(one: int, other: int) -> int:
    return one + other


class Operators(TorchDispatchMode):
    """It folds what ``tell(operator, arguments, result)`` says of each operation: ``found``, from 0 on."""

    def __init__(self, tell: Callable[[Any, Any, Any], int], fold: Callable[[int, int], int] = added) -> None:
        super().__init__()
        self.found, self._tell, self._fold = 0, tell, fold

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        result = function(*arguments, **(named or {}))
        self.found = self._fold(self.found, self._tell(function, arguments, result))
        return result


def calls_of(*names: str) -> Operators:
    """Count the calls of operators by their names."""
    return Operators(lambda operator, _, __: operator.overloadpacket.__name__ in names)


@contextmanager
def kept_for_backward() -> Iterator[list[Tensor]]:
    """The tensors that what runs in this block keeps for its backward."""
    kept = list[Tensor]()

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept
