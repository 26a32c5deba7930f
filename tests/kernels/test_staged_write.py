import pytest
import torch

from stepahead.kernels.staged_write import staged_write_reference, staged_write_triton


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("write", [staged_write_reference, staged_write_triton])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.bool])
@pytest.mark.parametrize(
    "segments",
    [[], [(0, 0, 1)], [(3, 5, 4), (1, 0, 0), (3, 9, 2), (0, 599, 1)], [(2, 10, 590), (1, 0, 300)]],
    ids=["none", "one value", "short and empty ones", "longer than one program"],
)
def test_segments_land_and_nothing_else_changes(device, write, dtype, segments):
    """segments: (row, start, length)."""
    if write is staged_write_reference:
        device = "cpu"
    lengths = [length for _, _, length in segments]
    values = torch.randint(0, 2 if dtype == torch.bool else 999, (sum(lengths) + 3,)).to(dtype)
    target = torch.zeros(4, 600, dtype=dtype)
    expected, done = target.clone(), 0
    for row, start, length in segments:
        expected[row, start : start + length] = values[done : done + length]
        done += length
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    rows, starts = ints(*(row for row, _, _ in segments)), ints(*(start for _, start, _ in segments))
    target = target.to(device)
    write(*(x.to(device) for x in (target, rows, starts, offsets, values)), max(lengths, default=0))
    assert torch.equal(target.cpu(), expected)


def test_a_column_of_a_table_without_columns_can_be_written():
    column = torch.zeros(5, dtype=torch.int32)
    staged_write_reference(column[:, None], ints(4, 1), ints(0, 0), ints(0, 1, 2), ints(7, 8), 1)
    assert column.tolist() == [0, 8, 0, 0, 7]
