"""Tables by columns: what features, roles and held-out rows follow from, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedblur
from fedblur.core.config import Config, config_hash, from_dict, to_dict
from fedblur.core.errors import ConfigError, DataError, FedBlurError
from fedblur.core.registry import build
from fedblur.data.federation import load_federation
from fedblur.data.population import Federation, Packed
from fedblur.data.table_schema import Column, hashed, read_schema

pa = pytest.importorskip("pyarrow")
pd = pytest.importorskip("pandas")

SCHEMA: dict[str, Any] = {
    "genre": {"categories": ["crime", "poetry", "travel"]},
    "age": {"range": [0, 100]},
    "liked": {"categories": ["no", "yes"]},
}
COLUMNS = ["genre", "age"]


def frame(rows: int = 600, users: int = 40, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "reader": [f"reader-{number:03}" for number in rng.integers(0, users, rows)],
            "genre": rng.choice(["crime", "poetry", "travel"], rows),
            "age": rng.integers(16, 90, rows),
            "title": rng.choice(["The dark river", "a long ROAD", "Über alles", ""], rows),
            "day": pd.date_range("2026-01-01", periods=rows, freq="h")[rng.permutation(rows)],
            "stars": rng.integers(1, 6, rows) / 2,
            "liked": rng.choice(["no", "yes"], rows),
        }
    )


def table(given: Any, target: str | list[str] = "liked", **settings: Any) -> Federation:
    settings = {"features": COLUMNS, "schema": SCHEMA} | settings
    return fedblur.federation_from_table(given, "reader", target, **settings)


def packed(data: Federation) -> Packed:
    assert isinstance(data.train, Packed)
    return data.train


def same(one: Federation, other: Federation) -> bool:
    a, b = packed(one), packed(other)
    pairs = [(a.x, b.x), (a.y, b.y), (a.sizes, b.sizes), (one.test.x, other.test.x), (one.test.y, other.test.y)]
    return all(torch.equal(x, y) for x, y in pairs) and one.members == other.members  # type: ignore[arg-type]


def write(kind: str, data: Any, folder: Path) -> Path:
    path = folder / f"rows.{kind}"
    if kind.startswith(("csv", "tsv")):
        data.to_csv(path, index=False, sep="\t" if kind == "tsv" else ",")
    elif kind == "parquet":
        data.to_parquet(path, row_group_size=100)
    elif kind == "feather":
        data.to_feather(path)
    else:
        with pa.OSFile(str(path), "wb") as file:
            whole = pa.Table.from_pandas(data, preserve_index=False)
            with pa.ipc.new_stream(file, whole.schema) as stream:
                stream.write_table(whole, max_chunksize=100)
    return path


# --- the same federation from every kind of table ---


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "tsv", "parquet", "feather", "arrow"])
def test_file__of_each_kind_gives_what_the_frame_gives(kind: str, tmp_path: Path) -> None:
    data = frame()
    assert same(table(write(kind, data, tmp_path), time="day"), table(data, time="day"))


def test_frame__of_each_library_gives_the_same() -> None:
    import datasets
    import polars

    data = frame()
    arrow = pa.Table.from_pandas(data, preserve_index=False)
    others = [arrow, polars.from_arrow(arrow), polars.from_arrow(arrow).lazy(), datasets.Dataset.from_pandas(data)]
    others.append(data.astype({"genre": "category", "reader": "category"}))
    assert all(same(table(other), table(data)) for other in others)


def test_rows__are_grouped_by_user_and_no_row_is_lost() -> None:
    data = frame()
    found = table(data, schema=SCHEMA | {"age": {"range": [0, 100], "scale": False}})
    train = packed(found)
    assert train.clients == data.reader.nunique()
    assert len(train.y) + len(found.test) == len(data)
    names = sorted(data.reader.unique())
    for client in (0, 7, 39):
        own = data[data.reader == names[client]]
        shard = slice(int(train.starts[client]), int(train.starts[client] + train.sizes[client]))
        mine = found.test_owners == client
        ages = torch.cat([train.x[shard, 3], found.test.x[mine, 3]])  # type: ignore[index]
        assert sorted(ages.tolist()) == sorted(map(float, own.age))
        assert int(mine.sum()) == int(0.2 * len(own))


# --- the privacy argument: constants never follow from rows ---


def test_features__of_a_user_do_not_change_with_the_rows_of_others() -> None:
    data = frame()
    wild = pd.DataFrame(
        {"reader": ["a"] * 3, "genre": ["crime"] * 3, "age": [10**6, -5, 50], "title": ["new words"] * 3,
         "day": [data.day[0]] * 3, "stars": [9.0] * 3, "liked": ["yes"] * 3}
    )  # fmt: skip
    settings: dict[str, Any] = {"features": ["genre", "age", "title"], "text_columns": ["title"]}
    both = pa.Table.from_pandas(pd.concat([wild, data]), preserve_index=False).combine_chunks()  # in one batch
    for more in ({}, {"time": "day"}, {"validation_share": 0.2}):
        before, after = table(data, **settings, **more), table(both, **settings, **more)
        x, y = packed(before), packed(after)  # the newcomer is first by name, so everyone else's number changes
        assert torch.equal(x.x, y.x[-len(x.y) :])  # type: ignore[index, arg-type]
        assert torch.equal(x.sizes, y.sizes[-x.clients :])
        assert torch.equal(before.test.x, after.test.x[-len(before.test) :])  # type: ignore[index, arg-type]
        assert y.clients - x.clients + after.validation_clients - before.validation_clients == 1


def test_shapes__follow_from_the_schema_and_not_from_what_occurs() -> None:
    data = frame()
    few = data[(data.genre == "crime") & (data.liked == "yes")]
    one, other = packed(table(data)), packed(table(few))
    assert one.shape == other.shape == (4,)
    assert one.classes == other.classes == 2


def test_range__clamps_and_scales_by_the_schema_alone() -> None:
    data = frame().assign(age=lambda d: np.where(d.index == 0, 10**9, d.age))
    found = packed(table(data, features=["age"]))
    ages = torch.cat([found.x, table(data, features=["age"]).test.x])[:, 0]  # type: ignore[list-item]
    assert float(ages.max()) == 1.0
    assert sorted(ages.tolist())[0] == pytest.approx(data.age.min() / 100)


def test_number__without_a_schema_stays_as_it_is() -> None:
    data = table(frame(), features=["age"], schema={"liked": SCHEMA["liked"]})
    found = packed(data)
    assert 16 <= float(found.x.min()) < float(found.x.max()) <= 90  # type: ignore[union-attr]
    assert data.note.endswith("; not scaled, having no range in the schema: age")
    assert "not scaled" not in table(frame()).note


def test_category__unseen_is_refused_or_goes_to_other() -> None:
    some = SCHEMA | {"genre": {"categories": ["crime", "poetry"]}}
    with pytest.raises(DataError, match=r"column 'genre' of .* has 'travel' in row \d+, which is not among its 2"):
        table(frame(), schema=some)
    found = packed(table(frame(), schema=some | {"genre": {"categories": ["crime", "poetry"], "other": True}}))
    assert found.shape == (4,)
    assert torch.equal(found.x[:, :3].sum(1), torch.ones(len(found.y)))  # type: ignore[index]


def test_hash__is_fixed_for_everyone() -> None:
    assert hashed(["crime", "poetry", "", "Über"], 1000) == [756, 490, 739, 716]
    assert hashed(["crime"], 1000) == hashed(["x", "crime"], 1000)[1:]


def test_schema_from__a_public_table_is_written_into_the_settings(tmp_path: Path) -> None:
    public, private = frame(seed=1), frame(seed=2).assign(age=lambda d: d.age * 5)
    path = write("csv", public, tmp_path)
    found = table(private, schema=None, schema_from=public, features=COLUMNS)
    assert packed(found).shape == (5,)  # three genres, another one, age
    assert float(packed(found).x.max()) == 1.0  # type: ignore[union-attr]
    part = build(
        "dataset", {"name": "table", "path": "private.csv", "user": "reader", "target": "liked", "features": COLUMNS,
                    "schema_from": str(path)},
    )  # fmt: skip
    assert part.schema_from is None
    assert {column.name for column in part.schema} == {"genre", "age", "liked"}
    assert next(c for c in part.schema if c.name == "age").range == (public.age.min(), public.age.max())


# --- splits ---


def test_time__the_last_rows_of_each_user_are_held_out() -> None:
    data = frame()
    found = table(data, time="day", features=["age"], schema=SCHEMA | {"age": {"range": [0, 1e9], "scale": False}})
    by_time = data.assign(age=data.day.astype("int64") // 10**9 % 10**9 // 3600)
    found = table(by_time, time="day", features=["age"], schema=SCHEMA | {"age": {"range": [0, 1e9], "scale": False}})
    train = packed(found)
    for client in range(train.clients):
        first = train.x[int(train.starts[client]) : int(train.starts[client] + train.sizes[client])]  # type: ignore[index]
        last = found.test.x[found.test_owners == client]  # type: ignore[index]
        assert not len(last) or float(first.max()) <= float(last.min())


def test_split_by_users__gives_whole_users_by_their_ids() -> None:
    data = frame(users=200)
    found = table(data, split="users", validation_share=0.1)
    assert found.test_owners is None
    assert 20 < 200 - found.train.clients - found.validation_clients < 60
    fewer = table(data[data.reader != "reader-007"], split="users", validation_share=0.1)
    assert abs(fewer.train.clients + fewer.validation_clients - found.train.clients - found.validation_clients) <= 1


def test_validation__users_train_on_nothing_and_are_not_in_the_test_rows() -> None:
    data = frame(users=100)
    found = table(data, validation_share=0.3)
    assert found.validation is not None
    assert found.by_id
    assert len(packed(found).y) + len(found.test) + len(found.validation) == len(data)
    assert int(found.validation_sizes.sum()) == len(found.validation)  # type: ignore[union-attr]
    assert int(found.test_owners.min()) >= 0  # type: ignore[union-attr]
    assert table(data, validation_share=0.3, clients=20).train.clients == 20


# --- what columns become ---


def test_inputs__codes_and_tokens_are_inputs_of_their_own() -> None:
    schema = SCHEMA | {"genre": {"buckets": 8, "codes": True}, "title": {"bytes": 5}}
    found = packed(table(frame(), features=["age", "genre", "title"], schema=schema))
    assert isinstance(found.x, dict)
    shapes = {name: (tuple(x.shape[1:]), x.dtype) for name, x in found.x.items()}
    assert shapes == {"numbers": ((1,), torch.float32), "codes": ((1,), torch.int32), "title": ((5,), torch.int32)}
    texts = {bytes(int(t) - 1 for t in row if t) for row in found.x["title"]}
    assert texts == {b"The d", b"a lon", "Über".encode(), b""}


def test_words__are_counted_in_buckets_of_length_one() -> None:
    found = packed(table(frame(), features=["title"], text_columns=["title"]))
    assert found.shape == (1024,)
    lengths = torch.linalg.vector_norm(found.x, dim=1)  # type: ignore[arg-type]
    assert set(np.round(lengths.numpy(), 5)) == {0.0, 1.0}


def test_targets__classes_numbers_and_several() -> None:
    data = frame()
    assert packed(table(data, "stars", schema={"genre": SCHEMA["genre"]})).y.dtype == torch.float32
    clamped = packed(table(data, "stars", schema=SCHEMA | {"stars": {"range": [1, 2]}})).y
    assert (float(clamped.min()), float(clamped.max())) == (1.0, 2.0)  # never scaled: errors are in its own unit
    many = packed(table(data, ["stars", "age"], features=["genre"]))
    assert many.y.shape[1:] == (2,)
    assert many.classes == 0
    whole = packed(table(data.assign(stars=(data.stars * 2).astype(int)), "stars", classes=6))
    assert (whole.classes, whole.y.dtype) == (6, torch.int64)
    lists = data.assign(v=[[1.0, float(i)] for i in range(len(data))])
    assert packed(table(lists, features=["v"], schema=SCHEMA | {"v": {"length": 2}})).shape == (2,)


def test_ids__keep_their_zeros_and_may_be_numbers(tmp_path: Path) -> None:
    data = frame(users=3).assign(reader=lambda d: d.reader.str[-3:])
    path = write("csv", data, tmp_path)
    assert same(table(path), table(data))
    assert table(data.assign(reader=data.reader.astype(int))).train.clients == 3


# --- refusals ---


def nothing(data: Any) -> Any:
    return data


@pytest.mark.parametrize(
    ("change", "settings", "words"),
    [
        (nothing, {"schema": None}, r"column 'genre' of .* is text: say in a schema"),
        (nothing, {"features": ["genr"]}, r"column 'genr' is not a column: did you mean 'genre'"),
        (nothing, {"schema": {"agee": {"range": [0, 1]}}}, r"schema column 'agee' is not a column: did you mean 'age'"),
        (nothing, {"schema": SCHEMA | {"age": {"rage": [0, 1]}}}, r"unknown key 'schema.rage': did you mean 'range'"),
        (nothing, {"schema": SCHEMA | {"age": {"range": [2, 1]}}}, r"range=\[2.0, 1.0\] must be \[lowest, highest\]"),
        (nothing, {"schema": SCHEMA | {"age": {"range": [0, 1], "words": 3}}}, r"is both words and range"),
        (nothing, {"schema": SCHEMA | {"genre": {"categories": ["a", "a"]}}}, r"category 'a' is named twice"),
        (nothing, {"features": ["age", "reader"]}, r"says who a user is"),
        (nothing, {"features": ["day"]}, r"column 'day' of .* is timestamp.*, which is no number"),
        (nothing, {"time": "genre"}, r"column 'genre' of .* has no order in time"),
        (nothing, {"test_share": 1.0}, r"test_share=1.0 must be in \(0, 1\)"),
        (nothing, {"test_share": 0.001}, r"holds no row out: no user has enough rows"),
        (lambda d: d[:0], {}, r"has no rows"),
        (lambda d: d.assign(age=d.age.where(d.index != 6)), {}, r"'age' of .* has 1 missing values of 600,.* row 7"),
        (lambda d: d.assign(genre=d.genre.where(d.index % 300 != 5)), {}, r"'genre' of .* has 2 missing .* in row 6"),
        (lambda d: d.assign(liked=d.liked.where(d.index != 2)), {}, r"column 'liked' of .* has 1 missing"),
        (lambda d: d.assign(reader=d.reader.where(d.index != 9, "")), {}, r"'reader' of .* has 1 missing .* in row 10"),
        (lambda d: d.assign(day=d.day.where(d.index != 9)), {"time": "day"}, r"column 'day' of .* has 1 missing"),
        (lambda d: d.assign(age=1e300), {"schema": SCHEMA | {"age": {}}}, r"'age' of .* is 1e\+300 in row 1"),
        (lambda d: d.assign(reader=d.age / 2), {}, r"column 'reader' of .* has decimals, which name nobody"),
        (lambda d: d.assign(liked="maybe"), {}, r"column 'liked' of .* has 'maybe' in row 1, which is not among its 2"),
    ],
)  # fmt: skip
def test_table__is_refused_by_name(change: Callable[[Any], Any], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(FedBlurError, match=words) as error:
        table(change(frame()), **settings)
    assert "\n" not in str(error.value)


def test_missing__may_have_a_public_stand_in() -> None:
    data = frame().assign(age=lambda d: d.age.where(d.index != 6), genre=lambda d: d.genre.where(d.index != 3))
    schema = SCHEMA | {"age": {"range": [0, 100], "missing": 50}}
    schema |= {"genre": {"categories": [*SCHEMA["genre"]["categories"], "none"], "missing": "none"}}
    assert packed(table(data, schema=schema)).shape == (5,)


def test_label__outside_of_classes_is_refused_by_row() -> None:
    data = frame().assign(stars=lambda d: (d.stars * 2).astype(int))
    with pytest.raises(DataError, match=r"target 'stars' of .* is 5.* in row \d+, must be a whole number in 0..4"):
        table(data, "stars", classes=5)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("no.csv", None, "does not exist"),
        ("rows.xlsx", b"x", r"the ending '.xlsx' is not known"),
        ("rows.parquet", b"not parquet", "cannot be read"),
        ("rows.arrow", b"not arrow", "cannot be read"),
        ("rows.csv", b"", "cannot be read"),
        ("rows.csv", b"reader,reader,liked\n1,2,no\n", "has column 'reader' twice"),
        ("rows.csv", b"reader,genre,age,liked\na,crime,3\n", "cannot be read"),
        (
            "rows.csv",
            b"reader,genre,age,liked\n" + 9 * b"a,crime,old,no\n",
            "column 'age': .* invalid value 'old'",
        ),
        ("rows.csv", b"reader,genre,age,liked\n\xff\xfe,crime,3,no\n", "cannot be read"),
    ],
)
def test_file__that_cannot_be_read_is_one_line(name: str, content: bytes | None, words: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(FedBlurError, match=words) as error:
        table(tmp_path / name)
    assert "\n" not in str(error.value)


def test_schema__is_read_from_toml_json_and_tables(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[columns.age]\nrange = [0, 100]\n[columns.genre]\ncategories = ["a", 2]\n')
    (tmp_path / "a.json").write_text(json.dumps({"age": {"range": [0, 100]}, "genre": {"categories": ["a", 2]}}))
    wanted = (Column("age", range=(0.0, 100.0)), Column("genre", categories=("a", "2")))
    assert read_schema(str(tmp_path / "a.toml")) == read_schema(tmp_path / "a.json") == wanted
    assert read_schema(wanted) == wanted
    for wrong in ("{", "[1]"):
        (tmp_path / "b.json").write_text(wrong)
        with pytest.raises(ConfigError):
            read_schema(tmp_path / "b.json")


# --- as a part of a configuration ---


def test_part__comes_back_from_a_run_folder_with_its_schema(tmp_path: Path) -> None:
    path = write("parquet", frame(), tmp_path)
    (tmp_path / "schema.toml").write_text('genre.categories = ["crime", "poetry", "travel"]\nage.range = [0, 100]\n')
    part = {
        "name": "table", "path": str(path), "user": "reader", "target": "liked", "features": COLUMNS,
        "schema": str(tmp_path / "schema.toml"),
    }  # fmt: skip
    config = Config(dataset=part)
    (tmp_path / "schema.toml").unlink()  # what counts is what the configuration holds
    again = from_dict(json.loads(json.dumps(to_dict(config))))
    assert config_hash(again) == config_hash(config)
    assert again.dataset == config.dataset
    schema = [*to_dict(config)["dataset"]["schema"], {"name": "liked", "categories": ["no", "yes"]}]
    data = load_federation({**part, "schema": schema}, data_dir=None)
    assert same(data, table(frame(), validation_share=0.1))
    assert not data.public
    assert data.members
    moved = {**part, "path": path.name, "schema": schema}
    assert same(load_federation(moved, data_dir=tmp_path), data)
    with pytest.raises(ConfigError, match="knows its users"):
        load_federation({**part, "schema": schema}, partition="iid")
    with pytest.raises(ConfigError, match="needs a file"):
        load_federation("table")


@pytest.mark.parametrize("known", [True, False], ids=["its metadata say so", "counted"])
def test_table__of_far_too_many_rows_is_refused(known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 11 MB stood for a billion rows, and took all memory."""
    monkeypatch.setattr("fedblur.data.table._MOST_ROWS", 599)
    path = tmp_path / ("a.parquet" if known else "a.csv")
    frame().to_parquet(path) if known else frame().to_csv(path, index=False)
    with pytest.raises(DataError, match="has more than 599 rows, which is the limit"):
        fedblur.federation_from_table(path, "reader", "liked", features=["age"], schema=SCHEMA)
