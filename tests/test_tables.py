from thunderpatch.tables import Column, Note, fit, fold, gathered, page, plain, screen

COLUMNS = (
    Column[tuple[str, str, str]]("module", lambda row: row[0]),
    Column[tuple[str, str, str]]("class", lambda row: row[1], keep=2),
    Column[tuple[str, str, str]]("calls", lambda row: row[2], keep=1, number=True),
)
ROWS = [("blocks.0", "Block", "7"), ("blocks.1.a[0]", "Block", "12")]


def test_a_narrow_table_drops_the_columns_that_are_kept_least() -> None:
    wide = len("blocks.1.a[0]  Block  calls")
    assert list(fit(COLUMNS, ROWS, wide)) == ["module", "class", "calls"]
    assert list(fit(COLUMNS, ROWS, wide - 1)) == ["module", "calls"]
    assert list(fit(COLUMNS, ROWS, 1)) == ["module"]


def test_a_column_with_nothing_to_say_is_left_out() -> None:
    assert list(fit(COLUMNS, [("a", "", "1")], 80)) == ["module", "calls"]


def test_a_long_name_folds_at_its_dots() -> None:
    assert fold("encoder.layers.11.out", 14) == "encoder.\n  layers.11.\n  out"
    assert fold("encoder.layers.11.out", 80) == "encoder.layers.11.out"
    assert fold("a" * 30, 10) == "a" * 30


def test_every_line_of_a_table_is_as_narrow_as_the_screen(monkeypatch) -> None:
    name = "model.vision_tower.encoder.layers.11.self_attention.out_projection.default"
    rows = [(name, "Linear", "1"), *ROWS]
    notes = [Note("eager", [name], "a reason " * 30)]
    for width in (40, 80, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = plain(screen("verdict " * 20, COLUMNS, rows, notes, width)).splitlines()
        assert max(map(len, lines)) <= width
        assert any(line.startswith("blocks.1.a[0]") and line.endswith("12") for line in lines)


def test_a_table_is_plain_ascii_whatever_its_cells_look_like_to_rich() -> None:
    text = plain(screen("[bold]verdict[/bold]", COLUMNS, ROWS, [Note("eager", ["a[0]"], "[red]x")], 80))
    assert text.isascii() and "\x1b" not in text
    assert "[bold]verdict[/bold]" in text and "blocks.1.a[0]" in text and "a[0]: [red]x" in text


def test_a_note_on_many_modules_names_the_first_and_the_last() -> None:
    names = [f"blocks.{i}" for i in range(12)]
    assert str(Note("split", names, "no index_put")) == (
        "blocks.0, blocks.1, ..., blocks.11 (12 modules): no index_put"
    )
    assert str(Note("split", names[:3], "no index_put")) == "blocks.0, blocks.1, blocks.2: no index_put"


def test_notes_on_the_same_modules_stand_under_one_heading() -> None:
    notes = [Note("split", ["a", "b"], "no cat"), Note("split", ["a", "b"], "no pad"), Note("eager", ["a"], "why")]
    lines = plain(screen("verdict", COLUMNS, [], notes, 80)).splitlines()
    assert lines[2:] == ["split  a, b:", "       - no cat", "       - no pad", "eager  a: why"]


def test_remarks_become_notes_by_kind_each_text_once() -> None:
    told = [("a", "split", "no cat"), ("a", "recompiled", "x"), ("b", "split", "no pad"), ("b", "split", "no cat")]
    assert gathered(told) == [
        Note("split", ["a", "b"], "no cat"),
        Note("split", ["b"], "no pad"),
        Note("recompiled", ["a"], "x"),
    ]


def test_remarks_that_differ_by_an_index_alone_are_one_note() -> None:
    told = [(f"layers.{k}", "recompiled", f"cache[{k}].size == {n}\nstack") for k, n in ((0, 7), (1, 7), (2, 8))]
    assert gathered(told) == [
        Note("recompiled", ["layers.0", "layers.1"], "cache[*].size == 7"),
        Note("recompiled", ["layers.2"], "cache[2].size == 8"),
    ]


def test_a_note_shows_the_first_line_of_its_text() -> None:
    note = Note("recompiled", ["a"], "x.size()[0] == 4     # in forward\nUser stack trace:\n  File ...")
    assert str(note) == "a: x.size()[0] == 4 # in forward"


def test_names_fold_only_where_the_columns_have_no_room() -> None:
    name = "model.layers.0.post_attention_layernorm"
    rows = [(name, "LlamaRMSNorm", "2")]
    assert fit(COLUMNS, rows, 80)["module"] == [name]
    assert fit(COLUMNS, rows, 58)["module"] == ["model.layers.0.\n  post_attention_layernorm"]


def test_html_shows_every_column_and_escapes_what_it_shows() -> None:
    text = page("1 < 2", COLUMNS, [("<a>", "B&C", "3")], [Note("eager", ["<a>"], "x > 0")])
    assert "<td>&lt;a&gt;</td><td>B&amp;C</td><td>3</td>" in text
    assert "1 &lt; 2" in text and "&lt;a&gt;: x &gt; 0" in text


def test_without_rows_there_is_only_the_verdict() -> None:
    assert plain(screen("nothing", COLUMNS, [], [], 80)) == "nothing"
    assert page("nothing", COLUMNS, [], []) == "<p><b>nothing</b></p>"
