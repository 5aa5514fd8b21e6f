"""The demo's arithmetic and its recount: two programs that must agree on any table."""

from __future__ import annotations

import csv
import gzip
import zipfile
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spark_integration.failures import find, marked
from statemgr.errors import InvalidError, UnavailableError
from statemgr_tools.demo.bait import AIMS, draw
from statemgr_tools.demo.dataset import FIELD_LIMIT, Dataset, flights
from statemgr_tools.demo.measures import EXACT, Tally, measures_of
from statemgr_tools.demo.recount import recount
from statemgr_tools.demo.summary import differences
from statemgr_tools.demo.verify import Side, plain, recounted

SUMS = ("a", "a*b")
NUMBERS = st.one_of(
    st.integers(-(10**12), 10**12).map(str),
    st.decimals(-(10**6), 10**6, places=4).map(str),
    st.sampled_from(
        ["", "NA", "-0", "+1.50", ".5", "5.", "1e3", "2E-3", "nan", "inf", "1_0", "x", "1e999", "1e-99", "٣"]
    ),
)
#: Spaces, also those of Unicode, and separators that Python strips.
SPACES = st.sampled_from(["", "", " ", "\t", "\u00a0", "\x1c", "\x85", "\u2003"])
POWERS = st.builds(
    "{}e{}{}{}".format,
    st.sampled_from(["0", "1", "-2.50"]),
    st.sampled_from(["", "+", "-"]),
    st.sampled_from(["", "0", "00000"]),
    st.one_of(st.integers(0, 70), st.integers(0, 10**9)),
)
FIELDS = st.builds("{}{}{}".format, SPACES, st.one_of(NUMBERS, POWERS), SPACES)
ROWS = st.lists(st.lists(st.one_of(FIELDS, st.sampled_from(["k", "l", "ü"])), min_size=1, max_size=4), max_size=20)


def tallied(dataset: Dataset) -> Side:
    """Return what the pipeline counts: tallies that are saved, loaded and added."""
    _, measures = measures_of(SUMS)
    tallies: dict[bytes, Tally] = {}
    for i, (key, row) in enumerate(dataset.rows()):
        one = Tally(len(measures))
        one.add_row(row, measures)
        name = key or b""
        if name in tallies and i % 2:
            one.add(Tally.from_json(tallies[name].to_json()))
            tallies[name] = one
        elif name in tallies:
            tallies[name].add(one)
        else:
            tallies[name] = one
    return Side("tally", {key: plain(tally) for key, tally in tallies.items()})


@settings(max_examples=150, deadline=None)
@given(rows=ROWS)
@example(rows=[["k", "\u00a05", "1"], ["k", "\x1c5", "1"], ["k", "1e00005", "1"], ["k", "0e99999", "1"]])
@example(rows=[["k", "9" * 60, "1"]])
def test_recount_and_tally_agree_on_any_table(tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]]) -> None:
    """Numbers, missing values, text and rows of the wrong width give equal results in both programs."""
    path = tmp_path_factory.mktemp("table") / "table.csv.gz"
    with gzip.open(path, "wt", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["key", "a", "b"], *rows])
    dataset = Dataset(path, "key", ("a", "b"))
    truth = recounted(recount(dataset, SUMS))
    assert differences(truth, tallied(dataset)) == []


def test_a_difference_in_the_last_digit_is_found(tmp_path: Path) -> None:
    """The comparison covers every key and is exact."""
    path = tmp_path / "table.csv"
    path.write_text("key,a,b\nx,0.1,3\nx,0.2,1\ny,1,1\n")
    dataset = Dataset(path, "key", ("a", "b"))
    truth = recounted(recount(dataset, SUMS))
    _, _, _, missing, sums, largest = truth.total()
    assert (missing, sums, largest) == ((0, 0), (Decimal("1.3"), Decimal("1.5")), (Decimal(1), Decimal(1)))
    rows, unparsable, absent, (one, two), top = truth.tallies[b"x"]  # type: ignore[misc]
    wrong = {**truth.tallies, b"x": (rows, unparsable, absent, (one, EXACT.add(two, Decimal("1e-50"))), top)}
    assert len(differences(truth, Side("wrong", wrong))) == 1
    assert len(differences(truth, Side("lost", {b"x": truth.tallies[b"x"]}))) == 1


@pytest.mark.long
def test_the_flights_have_their_known_totals() -> None:
    """The data set has 336,776 flights, 350,217,607 miles and 4,152,200 minutes of delay, with 8,255 values missing."""
    total = recounted(recount(flights(("dep_delay", "distance")), ("dep_delay", "distance"))).total()
    assert total[1:5] == (336_776, 0, (8_255, 0), (Decimal(4_152_200), Decimal(350_217_607)))


def test_wrong_columns_are_named(tmp_path: Path) -> None:
    """The error names a column that the file lacks. A product with a missing factor is refused."""
    path = tmp_path / "table.csv"
    path.write_text("key,a\nx,1\n")
    with pytest.raises(InvalidError, match="no column 'b'") as caught:
        list(Dataset(path, "key", ("b",)).rows())
    assert caught.value.hint == "it has key, a"
    with pytest.raises(InvalidError, match="product"):
        measures_of(["a*"])


def test_a_seed_always_draws_the_same_kills() -> None:
    """A printed seed repeats a run. Over many seeds, the kills hit every phase of a batch."""
    assert draw(5, 3) == draw(5, 3)
    assert {phase for seed in range(300) for phase, _ in draw(seed, 1)} == set(AIMS)
    assert draw(5, 2, ["output.write"])[0][0] == "output.write"


def test_typed_errors_survive_in_the_text_of_others() -> None:
    """The last marked error in quoted, indented and repeated text, as from Spark, is found. Damaged ones are not."""
    error = UnavailableError("no answer [from it]", hint="wait", blob="a/b")
    text = f"PythonException:\n    {marked(UnavailableError('older'))}\n\tat x.y\n  {marked(error)}\n"
    found = find(text)
    assert isinstance(found, UnavailableError)
    assert (found.message, found.hint, found.where) == ("no answer [from it]", "wait", {"blob": "a/b"})
    assert find(marked(error)[:-9] + "]") is None
    assert find("nothing") is None


def test_columns_with_spaces_in_their_names(tmp_path: Path) -> None:
    """Tallies and recount keep spaces within a column's name and ignore those around an asterisk."""
    path = tmp_path / "table.csv"
    path.write_text("key,Unit Price,Quantity\nx,1.5,2\n")
    sums = ("Unit Price", "Quantity * Unit Price")
    columns, measures = measures_of(sums)
    dataset = Dataset(path, "key", tuple(columns))
    assert recounted(recount(dataset, sums)).total()[4] == (Decimal("1.5"), Decimal(3))
    rows = [row for _, row in dataset.rows() if row is not None]
    assert [measure.value(rows[0]) for measure in measures] == [Decimal("1.5"), Decimal(3)]


def test_tables_as_spreadsheets_write_them(tmp_path: Path) -> None:
    """A byte order mark is not part of the first name, a column may have no name, and a field may be very long."""
    path = tmp_path / "table.csv"
    long = b"y,1,3," + b"9" * 200_000 + b"\ny,1," + b"0" * 5000 + b"7,1\n"
    path.write_bytes("\ufeffkey,,a,b\nx,0,1,2\n".encode() + long)
    dataset = Dataset(path, "key", ("a", "b"))
    truth = recounted(recount(dataset, SUMS))
    assert differences(truth, tallied(dataset)) == []
    assert truth.total()[:3] == (2, 3, 1)


def damaged(kind: str, path: Path) -> Path:
    """Write a file that does not match its name or its first line."""
    table = b"key,a,b\n" + b"".join(b"k%d,%d,%d\n" % (i, i * i, i) for i in range(5000))
    match kind:
        case "truncated":
            return _written(path / "table.csv.gz", gzip.compress(table)[:-4000])
        case "damaged":
            packed = bytearray(gzip.compress(table))
            packed[-4000:-3960] = b"\xff" * 40
            return _written(path / "table.csv.gz", bytes(packed))
        case "plain":
            return _written(path / "table.csv.gz", table)
        case "zip":
            return _written(path / "table.zip", table)
        case "twice":
            return _written(path / "table.csv", b"key,a,b,a\nx,1,1,1\n")
        case "quote":
            return _written(path / "table.csv", b'key,a,b\nx,1,1\nx,"1,2\n' + b"x" * (FIELD_LIMIT + 1))
        case _:
            with zipfile.ZipFile(path / "table.zip", "w") as archive:
                archive.writestr("one.csv", table)
                archive.writestr("two.csv", table)
            return path / "table.zip"


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("kind", ["truncated", "damaged", "plain", "zip", "twice", "quote", "two files"])
def test_files_that_cannot_be_read(tmp_path: Path, kind: str) -> None:
    """Each kind of unreadable file raises InvalidError with the file and a hint."""
    path = damaged(kind, tmp_path)
    dataset = Dataset(path, "key", ("a", "b"))
    with pytest.raises(InvalidError) as caught:
        list(dataset.rows())
    assert caught.value.exit_status == 2
    assert caught.value.hint
    assert caught.value.where["file"] == str(path)
    if kind in ("truncated", "damaged"):
        assert caught.value.where["line"] > 1  # type: ignore[operator]
    if kind != "twice":  # the recount comes second
        with pytest.raises(InvalidError):
            recount(dataset, SUMS)
