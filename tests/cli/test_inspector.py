"""`bipace report --html`: its numbers are those of the package's functions, texts stay texts, the size is bounded."""

import base64
import csv
import hashlib
import re
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from browsers import chromium
from cli_runs import GOLDEN, PRESETS, direct, fail, observations, record, run, unpack, write

import bipace_kernels as bk
from bipace_kernels.backends.reference import critic
from bipace_kernels.cli import inspector, rollouts
from bipace_kernels.estimators.table import kernel_rows

MARKUP = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 2'> & \u2028"


pytestmark = pytest.mark.usefixtures("undrawn")


def made_by(path, folder, *options):
    done = run("report", path, "--out", folder, "--epsilons", "0.25", "--no-similar", "--html", *options)
    assert done.exit_code == 0, done.output
    assert str(folder / "inspector.html") in done.output.replace("\n", "")
    return (folder / "inspector.html").read_text(encoding="utf-8")


def content_of(tmp_path, rows, *options):
    return unpack(made_by(write(tmp_path / "a.jsonl", rows), tmp_path / "out", *options))


def close(found, wanted):
    wanted = wanted.numpy() if isinstance(wanted, torch.Tensor) else wanted
    np.testing.assert_allclose(np.array(found, float), wanted, rtol=6e-4, atol=1e-7)  # four digits


def test_numbers_are_a_direct_computation(games, tmp_path):
    content = unpack(made_by(games, tmp_path / "out"))
    columns, seen = content["columns"], observations(games)
    line = np.array(columns["line"]) - 1  # back to the order of the file
    assert sorted(line.tolist()) == list(range(len(seen)))
    assert [content["texts"][i] for i in columns["observation"]] == [seen[i] for i in line]
    fingerprint, scaled = bk.ngram_fingerprint(seen), []
    for key, config in PRESETS.items():
        given = {"fingerprint": fingerprint} if config.needs_fingerprint else {"observation": seen}
        result = direct(games, config, **({} if key == "grpo" else given))
        close(columns["advantage"][key], result.advantage[line])
        assert columns["branch"][key] == result.branch[line].tolist()
        advantage = result.advantage[line].double().numpy()
        scaled.append(advantage / np.sqrt(np.mean(advantage**2)))
        close(columns["scaled"][key], scaled[-1])
        name = {"gigpo": "exact", "hgpo": "history", "bigpo": "cosine"}.get(key)
        if name is not None:
            assert columns["cluster"][name] == result.cluster[line].tolist()
    close(columns["returns"], result.returns[line])
    close(columns["value"], result.value[line])
    close(columns["spread"], np.max(scaled, axis=0) - np.min(scaled, axis=0))


def test_groups_have_their_success_and_spread(tmp_path):
    content = content_of(tmp_path, GOLDEN)  # totals 1, 0, 0
    (group,) = content["groups"]
    assert group == {
        "file": 0, "task": "key", "rollouts": 3, "records": 6, "success": 0.3333, "mean": 0.3333, "std": 0.4714,
    }  # fmt: skip
    assert [path["total"] for path in content["rollouts"]] == [1.0, 0.0, 0.0]
    assert [path["success"] for path in content["rollouts"]] == [True, False, False]
    actions = content["columns"]["same_action"]
    assert actions[1] == actions[5] and len(set(actions)) == 4  # "take" and " take"
    same = [dict(row, reward=reward) for row, reward in zip(GOLDEN, (0.1, 0.2, 0.3, 0.0, 0.2, 0.1), strict=True)]
    assert content_of(tmp_path, same)["groups"][0]["std"] == 0.0  # rounding of sums is no spread


def test_success_takes_a_threshold(tmp_path):
    rows = [dict(row, reward=0.1) for row in GOLDEN[:2]] + GOLDEN[2:4]  # totals 0.2 and 0
    assert [path["success"] for path in content_of(tmp_path, rows)["rollouts"]] == [True, False]
    content = content_of(tmp_path, [*rows, *rows], "--success-above", 0.3, "--duplicates", "count")
    assert [path["total"] for path in content["rollouts"]] == [0.2, 0.0] and content["groups"][0]["success"] == 0
    content = content_of(tmp_path, rows, "--success-above", 0.5)
    assert [path["success"] for path in content["rollouts"]] == [False, False] and content["groups"][0]["success"] == 0
    assert content["success_above"] == 0.5
    rows = [dict(row, reward=500.2) for row in rows]
    assert content_of(tmp_path, rows)["rollouts"][0]["total"] == 1000.4  # not rounded: the page compares it again
    given = content_of(tmp_path, [dict(row, success=True) for row in rows], "--success-above", 0.5)
    assert [path["success"] for path in given["rollouts"]] == [True, True] and given["success_above"] is None


def test_neighbours_are_the_nearest_by_the_kernel_of_gae(games, tmp_path):
    content = unpack(made_by(games, tmp_path / "out"))
    columns, seen = content["columns"], observations(games)
    config, line = PRESETS["gae"], np.array(columns["line"]) - 1
    fingerprint = bk.ngram_fingerprint(seen)
    result = direct(games, config, fingerprint=fingerprint)
    lay = result._records().layout
    row = np.empty(len(seen), int)
    row[lay.order.numpy()] = np.arange(len(seen))
    rows = kernel_rows(critic, config, lay.on(torch.device("cpu")), fingerprint, None)[1][:2]  # batch, inside groups
    step, group = np.array(columns["step"]), np.array(columns["group"])
    late = (step[:, None] - step) ** 2 / (2 * config.kernel_time**2)
    parts = []
    for z in (of.double().numpy()[row[line]] for of in rows):
        z = z / np.linalg.norm(z, axis=1, keepdims=True)
        parts.append(np.exp((np.minimum(z @ z.T, 1) - 1) / config.kernel_width - late))
    k = (parts[0] + config.kernel_inside * parts[1]) / (1 + config.kernel_inside)
    k[(group[:, None] != group) | np.eye(len(k), dtype=bool)] = -1
    for i, (near, shown) in enumerate(zip(columns["neighbours"], columns["kernel"], strict=True)):
        assert len(near) == 8 and i not in near
        close(shown, np.sort(k[i])[::-1][:8])
        close(k[i][near], shown)


def test_what_takes_no_part(tmp_path):
    """Padding and copies are not shown; a rollout set aside is, in no cluster and with advantage 0."""
    rows = [dict(row) for row in GOLDEN]
    rows += [dict(rows[0]), record(3, 0, "room", "go", float("nan")), record(4, 0, "room", "go", valid=False)]
    content = content_of(tmp_path, rows, "--duplicates", "once", "--on-invalid", "singleton")
    columns = content["columns"]
    assert columns["line"] == [1, 2, 3, 4, 5, 6, 8]
    assert columns["reward"][-1] is None and content["rollouts"][-1]["total"] is None
    for name, clusters in columns["cluster"].items():
        assert clusters[-1] == -1, name
    for key in PRESETS:
        assert columns["advantage"][key][-1] == 0
    assert content["groups"][0]["success"] == 0.3333


OWN = {"bipace_advantage": [0.5, -1.25, 0.5, 2.0, 0.0, -3.0], "bipace_cluster": [0, 1, 0, 2, -1, 1]}


def trained():
    return [dict(row, **{name: column[i] for name, column in OWN.items()}) for i, row in enumerate(GOLDEN)]


def test_what_a_trainer_recorded_stands_beside_the_presets(tmp_path):
    content = content_of(tmp_path, trained())
    columns = content["columns"]
    assert [row["key"] for row in content["estimators"]] == [*PRESETS, "trained"]
    assert columns["advantage"]["trained"] == OWN["bipace_advantage"]
    assert columns["cluster"]["trained"] == OWN["bipace_cluster"]
    padding = [dict(row, valid=False) for row in trained()]
    for rows, want in ((trained(), [-1, -1, 0, 0, 1, 1, 2, 3, 3, 4, 4, 5]), (padding, [])):  # each file has its own
        merged = content_of(tmp_path, rows, write(tmp_path / "c.jsonl", rows), "--merge-files")
        assert sorted(merged["columns"]["cluster"]["trained"]) == want
    (tmp_path / "second").mkdir()
    twice = content_of(tmp_path, GOLDEN, write(tmp_path / "second/a.jsonl", GOLDEN), "--merge-files")
    names = [path["name"] for path in twice["rollouts"]]
    assert len(set(names)) == len(names) and sum("second" in name for name in names) == len(names) // 2
    near = [dict(row, bipace_neighbours=[(i + 1) % 6, 6], bipace_kernel=[0.5, 0.1]) for i, row in enumerate(trained())]
    path = write(tmp_path / "d.jsonl", near)
    path.write_text(path.read_text().replace("\n", "\n\n"))  # blank lines are no rows
    near_page = unpack(made_by(path, tmp_path / "near"))
    found = near_page["columns"]
    assert near_page["neighbours"] == "trained"
    assert [[found["line"][j] for j in row] for row in found["neighbours"]] == [[(n + 2) % 12] for n in found["line"]]
    path = write(tmp_path / "e.jsonl", [{k: v for k, v in row.items() if k != "bipace_kernel"} for row in near])
    assert unpack(made_by(path, tmp_path / "alone"))["neighbours"] == "recomputed"
    several = np.array([columns["scaled"][key] for key in (*PRESETS, "trained")])
    np.testing.assert_allclose(columns["spread"], several.max(axis=0) - several.min(axis=0), rtol=2e-3)
    path = write(tmp_path / "b.jsonl", [dict(row, bipace_cluster="a") for row in trained()])
    assert 'bipace_cluster": expected an integer of at least −1' in fail("report", path, "--out", tmp_path, "--html")


def test_several_files_share_one_page_and_no_cluster(tmp_path):
    first, second = write(tmp_path / "a.jsonl", GOLDEN), write(tmp_path / "b.jsonl", GOLDEN[:4])
    assert run("report", first, second, "--out", tmp_path / "out", "--epsilons", "0.25", "--html").exit_code == 0
    content = unpack((tmp_path / "out/inspector.html").read_text(encoding="utf-8"))
    assert content["files"] == ["a.jsonl", "b.jsonl"]
    columns, group = content["columns"], content["columns"]["group"]
    assert [row["file"] for row in content["groups"]] == [0, 1] and group == [0] * 6 + [1] * 4
    for clusters in columns["cluster"].values():
        assert set(clusters[:6]).isdisjoint(clusters[6:])
    for i, near in enumerate(columns["neighbours"]):
        assert {group[j] for j in near} == {group[i]}


def test_texts_are_never_markup(tmp_path):
    rows = [dict(row, observation=row["observation"] + MARKUP, action=row["action"] + MARKUP) for row in GOLDEN]
    rows = [dict(row, task_id=f"<b>{MARKUP}", rollout=f"{row['rollout']}{MARKUP}") for row in rows]
    path = write(tmp_path / "<i onclick=x>.jsonl", rows)
    made = made_by(path, tmp_path / "out")
    assert "window.broken" not in made and "<i onclick" not in made and "&lt;i onclick=x&gt;.jsonl" in made
    assert len(re.findall("<script", made, re.IGNORECASE)) == len(re.findall("</script", made, re.IGNORECASE)) == 2
    content = unpack(made)
    assert content["texts"][0] == "room" + MARKUP and content["groups"][0]["task"].startswith("<b></script>")


def test_the_page_allows_its_own_script_and_style_and_nothing_else(tmp_path):
    made = made_by(write(tmp_path / "a.jsonl", GOLDEN), tmp_path / "out")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', made)[1].replace("&#39;", "'")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        text = re.findall(f"<{tag}>(.*?)</{tag}>", made, re.DOTALL)[0]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    assert rules["default-src"] == "'none'"
    assert not re.search(r"https?://|innerHTML|insertAdjacentHTML|document\.write|eval\(", made)


@pytest.mark.slow
def test_ten_thousand_records_are_below_5_mb(tmp_path):
    """Also of texts that no compression helps: they are cut, and say by how much."""
    rng, n = np.random.default_rng(0), 10_000
    texts = [base64.b64encode(rng.bytes(600)).decode() for _ in range(n)]
    rows = [
        {"task_id": i // 200, "rollout": i // 20, "step": i % 20, "observation": texts[i], "reward": rng.normal(),
         "action": f"go {rng.integers(9)}"}
        for i in range(n)
    ]  # fmt: skip
    records = rollouts.read([str(write(tmp_path / "a.jsonl", rows))], wanted=["action"])
    options = SimpleNamespace(
        gamma=0.95, history_length=2, duplicates="raise", on_invalid="raise", action_mode="text", backend="auto",
        threads=None, success_above=0.0,
    )  # fmt: skip
    states = torch.from_numpy(rng.normal(size=(n, 8)).astype(np.float32))
    made = inspector.page([inspector.Part("a.jsonl", records, states, "ngram", 0.25)], options)
    assert 3_000_000 < len(made.encode()) < 5_000_000
    found = [text for text in unpack(made)["texts"] if not str(text).startswith("go ")]
    for text, wanted in zip(found, texts, strict=True):
        assert len(text["start"]) >= 200 and wanted.startswith(text["start"])
        assert len(text["start"]) + text["more"] == 800


@pytest.fixture(scope="module")
def browser():
    """Chromium, Debian's or another, driven by Playwright."""
    with chromium() as opened:
        yield opened


@pytest.fixture
def opened(browser):
    """Opens pages that show the inspector of a folder; in the end none of them may have had an error."""
    wrong = []

    def show(folder, place="", **how):
        page = browser.new_page(**{"viewport": {"width": 1400, "height": 900}, **how})
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text))
        page.on("request", lambda request: request.url.startswith(("file:", "blob:")) or wrong.append(request.url))
        page.goto((folder / "inspector.html").as_uri() + place)
        page.wait_for_selector("main:not([hidden])")
        return page

    yield show
    for context in browser.contexts:
        context.close()
    assert wrong == []


@pytest.mark.slow
def test_in_chromium(opened, tmp_path):
    rows = [dict(row, observation=f"{row['observation']} {MARKUP}", action=row["action"] + MARKUP) for row in GOLDEN]
    rows += [dict(row, task_id="other", reward=0.0) for row in GOLDEN]
    content = content_of(tmp_path, rows)
    page = opened(tmp_path / "out", offline=True, color_scheme="dark")
    # The group with outcomes that differ comes first, the text of its step is text.
    assert page.inner_text("#timeline-title") == "Timeline of task key"
    assert page.text_content("#observation").endswith(f" {MARKUP}")
    assert page.text_content("#action").endswith(MARKUP)
    assert page.evaluate("window.broken") is None and page.locator("main img, main script").count() == 0
    # A click on a cell shows that step: six estimators with its numbers, its peers and neighbours.
    cells = page.locator("#timeline .cell")
    assert cells.count() == 6
    cells.nth(1).click()
    assert page.inner_text("#step-title") == "Step 1 of rollout 0"
    for key, row in zip(PRESETS, page.locator("#estimators tbody tr").all(), strict=True):
        shown = row.locator("td").first.inner_text().replace("−", "-")
        assert float(shown) == pytest.approx(content["columns"]["advantage"][key][1], abs=6e-4)
    assert page.locator("#neighbours tbody tr").count() == 5
    page.select_option("#partition", "exact")
    assert [link.inner_text() for link in page.locator("#peers .go").all()] == ["2 · 1"]  # both in the hall
    page.locator("#peers .go").first.click()
    assert page.inner_text("#step-title") == "Step 1 of rollout 2" and page.url.endswith("#step=5&partition=exact")
    # Arrow keys, in the timeline and in tables.
    page.locator('#timeline .cell[aria-pressed="true"]').focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowUp")
    assert page.inner_text("#step-title") == "Step 0 of rollout 1"
    page.keyboard.press("]")
    assert page.inner_text("#step-title") == "Step 1 of rollout 1"
    page.locator("#groups tbody tr[tabindex='0']").focus()
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#timeline-title") == "Timeline of task other"
    # Filters and order of the list.
    page.select_option("#scope", "all")
    assert "of 12 steps" in page.inner_text("#count")
    advantage = content["columns"]["advantage"]["bipace"]
    page.fill("#least", "1")
    wanted = sorted((abs(a) for a in advantage if abs(a) >= 1), reverse=True)
    page.locator("#steps thead button").nth(4).click()
    shown = [abs(float(a.replace("−", "-"))) for a in page.locator("#steps tbody td:nth-child(5)").all_inner_texts()]
    assert shown == pytest.approx(wanted, abs=6e-4) and 0 < len(shown) < 12
    page.fill("#least", "0")
    page.fill("#disagree", "0.7")
    count = sum(spread >= 0.7 for spread in content["columns"]["spread"])
    assert page.locator("#steps tbody tr").count() == count and 0 < count < 12
    page.fill("#disagree", "0")
    page.fill("#find-step", "ROOF")
    assert page.locator("#steps tbody tr").count() == 2
    page.fill("#find-step", "")
    page.select_option("#cluster", "alone")
    page.select_option("#scope", "group")
    assert page.locator("#steps tbody tr").count() == 1  # the roof
    # Colours: those of the system, the other ones, and those of the system after it changed.
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.emulate_media(color_scheme="light")
    page.locator("#theme", has_text="Dark").wait_for()
    assert page.evaluate(background) != dark
    page.click("#theme")
    assert page.evaluate(background) == dark and page.inner_text("#theme") == "Light"


@pytest.mark.slow
def test_in_chromium_a_training_run_s_own_credit_comes_first(opened, tmp_path):
    made_by(write(tmp_path / "a.jsonl", trained()), tmp_path / "out")
    page = opened(tmp_path / "out", "#step=5", color_scheme="light")
    assert page.input_value("#estimator") == page.input_value("#partition") == "trained"
    assert page.locator("#estimators tbody tr").last.inner_text().split("\t")[:2] == ["as trained", "−3.000"]
    assert [link.inner_text() for link in page.locator("#peers .go").all()] == ["0 · 1"]


#: Numbers that do not end inside their field or panel, tables wider than theirs, and a page wider than the window.
CUT = """() => {
  const wrong = [];
  if (document.documentElement.scrollWidth > innerWidth) wrong.push("the page is wider than the window");
  const say = (what, node) => wrong.push(`${what}: ${node.closest("section, aside").id} ${node.textContent}`);
  for (const node of document.querySelectorAll(".number")) {
    const panel = node.closest(".scroll").getBoundingClientRect(), box = node.getBoundingClientRect();
    if (node.scrollWidth > node.clientWidth) say("cut", node);
    if (box.width && (box.left < panel.left - 1 || box.right > panel.right + 1)) say("outside", node);
  }
  for (const node of document.querySelectorAll(".scroll:not(#cells)"))
    if (node.scrollWidth > node.clientWidth) say("wide", node);
  for (const node of document.querySelectorAll("#cells th span"))
    if (node.scrollWidth > node.clientWidth) say("cut", node);
  for (const node of document.querySelectorAll("#groups td.text, #steps td.text"))
    if (node.clientWidth < 80) say("narrow", node);
  for (const node of document.querySelectorAll(".rows")) {
    const chosen = node.querySelector("[aria-selected=true]"), head = node.tHead.getBoundingClientRect();
    if (chosen && chosen.getBoundingClientRect().top < head.bottom - 1) say("under the headings", chosen);
  }
  const cells = document.querySelector("#cells"), right = cells.getBoundingClientRect().left + cells.clientWidth;
  const left = cells.querySelector("th").getBoundingClientRect().right;
  for (const node of cells.querySelectorAll(".cell .top span")) {
    const box = node.getBoundingClientRect();
    if ((box.left < right && box.right > right + 1) || (box.left < left - 1 && box.right > left)) say("edge", node);
    if (node.scrollWidth > node.parentElement.clientWidth) say("cut", node);
  }
  return wrong;
}"""


@pytest.mark.slow
def test_in_chromium_nothing_is_cut_at_any_width(opened, tmp_path):
    rng, rows = np.random.default_rng(0), []
    for task, rollout, step in np.ndindex(3, 4, 15):
        size = (1.0, 12345.6, 3e-7)[task]
        text = f"{'an observation or action of many words ' * 5}{rng.integers(3)}"
        ids = {"task_id": f"a task with a long name, {task}", "rollout": f"a rollout with a long name, {rollout}"}
        trained = {"bipace_advantage": size * rng.normal(), "bipace_cluster": 15 * task + step}
        rows.append(record(0, step, text, text, size * rng.normal()) | ids | trained)
    made_by(write(tmp_path / "a.jsonl", rows), tmp_path / "out", write(tmp_path / "another.jsonl", rows[:60]))
    page = opened(tmp_path / "out")
    assert page.locator("#course circle").count() > page.locator("#course polyline").count() == 0  # not over time
    page.select_option("#scope", "all")
    page.locator("#groups thead button").nth(3).click()  # sorted by spread, the tasks stay in view
    for width in (360, 390, 768, 1010, 1280, 1400, 1920, 2560):
        page.set_viewport_size({"width": width, "height": 900})
        page.locator("#cells .cell").last.click()
        page.wait_for_timeout(200)
        for view in ("transcript", "pair", "cells"):
            page.select_option("#view", view)
            assert page.evaluate(CUT) == [], (width, view)


def saved(page, button):
    with page.expect_download() as download:
        page.click(button)
    with download.value.path().open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


@pytest.mark.slow
def test_in_chromium_a_group_its_rollouts_filters_and_files(opened, tmp_path):
    rows = [*GOLDEN, *(dict(row, task_id="other", reward=0.0) for row in GOLDEN)]
    rows[3] = dict(rows[3], action='=1+1,"x"')
    columns = content_of(tmp_path, rows)["columns"]
    page = opened(tmp_path / "out")
    # The heat map: a dot for each step, darker for a larger |A|, marked with its cluster; it chooses the step.
    share = "node => [parseInt(node.style.getPropertyValue('--share')), node.style.getPropertyValue('--sign')]"
    dots = page.locator("#heat .dot")
    largest = max(map(abs, columns["advantage"]["bipace"][:6]))
    for dot, a in zip(dots.all(), columns["advantage"]["bipace"][:6], strict=True):
        found, sign = dot.evaluate(share)
        assert found == pytest.approx(80 * abs(a) / largest, abs=1)
        assert sign == f"var(--{'above' if a > 0 else 'below' if a < 0 else 'none'})"
    page.select_option("#partition", "exact")
    assert dots.all_inner_texts() == ["A", "B", "A", "", "A", "B"]  # rooms, halls, and the roof alone
    for width, shown in ((100 + 12 * 2, "0px"), (1400, "10px")):  # letters where they have room
        page.eval_on_selector("#timeline", f"node => {{ node.style.width = '{width}px' }}")
        page.wait_for_timeout(200)
        assert dots.first.evaluate("node => getComputedStyle(node).fontSize") == shown
    page.eval_on_selector("#timeline", "node => { node.style.width = '' }")
    dots.nth(5).click()
    assert page.inner_text("#step-title") == "Step 1 of rollout 2"
    # A rollout to read has A beside each turn; two stand side by side, step by step.
    turns = page.locator("#transcript .turn")
    page.locator("#heat .go").nth(1).click()
    assert turns.locator(".go").all_inner_texts() == ["1 · 0", "1 · 1"]
    page.select_option("#first", label="2 (failure)")
    assert [turn.locator("pre").all_inner_texts() for turn in turns.all()] == [["room", "WAIT "], ["hall", " take"]]
    beside = [float(text[2:].replace("−", "-")) for text in turns.locator("b.number").all_inner_texts()]
    assert beside == pytest.approx(columns["advantage"]["bipace"][4:6], abs=6e-4)
    page.select_option("#view", "pair")
    assert turns.locator(".go").all_inner_texts() == ["2 · 0", "0 · 0", "2 · 1", "0 · 1"]  # a failure, the success
    turns.locator(".go").nth(2).click()
    left, right = (turns.nth(k).bounding_box() for k in (2, 3))
    assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"]
    # The link leads to the same step, estimator, partition, view, second rollout and filters.
    page.select_option("#estimator", "gae")
    page.select_option("#second", label="1 (failure)")
    page.fill("#least", "0.5")
    page.click("#link")
    page.locator("#link", has_text="Copied").wait_for()
    link = page.url
    page.focus("#find-group")
    page.keyboard.press("Control+V")
    assert page.input_value("#find-group") == link
    other = opened(tmp_path / "out")
    other.goto(link)
    other.locator("#transcript.pair").wait_for()
    for name in ("#estimator", "#partition", "#second", "#least"):
        assert other.input_value(name) == page.input_value(name) != ""
    assert other.inner_text("#step-title") == "Step 1 of rollout 2" and other.url == link
    page.fill("#least", "0")
    # Filters of groups, empty lists, and the list of steps of what is left.
    names = page.locator("#groups tbody td:first-child")
    assert names.all_inner_texts() == ["No prompt group matches the filters."]
    page.fill("#find-group", GOLDEN[0]["observation"])  # of both groups
    page.check("#only-spread")
    assert names.all_inner_texts() == ["key"]
    page.uncheck("#only-spread")
    page.select_option("#outcome", "none")
    assert names.all_inner_texts() == ["other"]
    page.select_option("#scope", "all")
    assert page.inner_text("#count") == "1 to 6 of 6 steps"
    page.select_option("#outcome", "")
    page.select_option("#ended", "1")
    assert page.locator("#steps tbody tr").count() == 2  # rollout 0 of "key"
    bars = """figures => figures.map(
      f => [...f.querySelectorAll("title")].reduce((n, title) => n + parseInt(title.textContent), 0))"""
    assert page.eval_on_selector_all("#histograms figure", bars) == [2] * len(PRESETS)
    page.fill("#find-step", "nowhere")
    assert page.inner_text("#steps tbody") == "No step matches the filters." and page.inner_text("#count") == "0 steps"
    assert page.locator("#histograms").inner_text().count("no step") == len(PRESETS)
    page.click("#steps button[type=reset]")
    page.locator("#steps tbody tr").nth(5).wait_for()
    # Comma-separated values of what is listed; no text is a formula.
    table = saved(page, "#save-steps")
    assert [row[4] for row in table] == ["outcome", "success", "success", *["failure"] * 4]
    assert table[4][7] == '\'=1+1,"x"' and table[0][-1] == "A_gae"
    assert [float(row[-1]) for row in table[1:]] == columns["advantage"]["gae"][:6]
    assert saved(page, "#save-groups")[1][:4] == ["a.jsonl", "key", "3", "0.3333"]
    # Every heading, field and button of a heading has a tooltip of its own.
    bare = """nodes => nodes.filter(node => !node.title && !node.querySelector("[title]") && node.textContent)
      .map(node => node.textContent)"""
    for every in ("main h2, main h3", "main thead th", "main label, header label"):
        assert page.eval_on_selector_all(every, bare) == [], every


@pytest.mark.slow
def test_in_chromium_a_run_over_time_and_why_gae_trained_as_it_did(opened, tmp_path):
    paths = []
    for update in (50, 100, 0):  # the last one has the smallest number
        rows = []
        for i, row in enumerate(GOLDEN):
            reason = {"value": i / 4, "returns": i % 2 / 2, "delta": 0.125 - i, "step_term": i - 2.5}
            near = {"bipace_cluster": i, "bipace_neighbours": [(i + 2) % 6], "bipace_kernel": [0.75]}
            own = {f"bipace_{name}": value for name, value in reason.items()} | near | {"bipace_advantage": i - 2.5}
            call = '<tool_call>\n{"name": "take", "arguments": {"what": "key", "times": 2}}\n</tool_call>'
            action = f"so {call}" if i == 5 else f"so <action> {row['action']} </action>"
            rows.append(dict(row, reward=row["reward"] * update / 100, action=action) | own)
        if update == 50:  # a rollout that training set aside, which counts in nothing
            rows.append(rows[3] | {"rollout": 3, "reward": float("nan"), "bipace_cluster": -1, "bipace_value": 0.0})
        paths.append(tmp_path / f"update_{update:08d}.parquet")
        pq.write_table(pa.Table.from_pylist(rows), paths[-1])
    folder = tmp_path / "out"
    made_by(paths[0], folder, *paths[1:], "--action-mode", "action_tag", "--on-invalid", "singleton")
    page = opened(folder)
    # Updates in their order, with metrics along them; the slider shows the groups of one.
    success = page.locator("#course figure").first
    assert success.locator("title").all_text_contents() == ["update 0: 0.000", "update 50: 0.333", "update 100: 0.333"]
    explained = page.locator("#course figure").last.locator("title").all_text_contents()  # as metrics() has it
    assert explained == ["update 0: −4.167", "update 50: −4.167", "update 100: −4.167"]
    page.locator("#slider").focus()
    names = {"Home": "update 0 (1 of 3)", "ArrowRight": "update 50 (2 of 3)", "End": "update 100 (3 of 3)"}
    for key, name in names.items():
        page.keyboard.press(key)
        assert page.inner_text("#update") == name
        assert page.locator("#groups tbody td:first-child").all_inner_texts() == [f"key {name.partition(' (')[0]}"]
        assert page.inner_text("#timeline-title") == f"Timeline of task key, {name.partition(' (')[0]}"
        assert page.inner_text("#step dl").count(f"update_{int(name.split()[1]):08d}.parquet") == 1
    link = page.url
    page.click("#every")
    assert page.locator("#groups tbody tr").count() == 3
    assert page.inner_text("#update") == "all 3; the group shown: update 100"
    # A threshold decides what is a success where the file does not say.
    page.fill("#above", "0.5")
    assert success.locator("title").all_text_contents() == ["update 0: 0.000", "update 50: 0.000", "update 100: 0.333"]
    assert "33 %" in page.inner_text("#timeline .legend")
    assert "above=0.5" in page.url
    other = opened(folder, f"#{link.partition('#')[2]}&above=0.5")  # of the last update alone
    assert other.locator("#groups tbody tr").count() == 1
    assert other.locator("#course title").all_text_contents()[1] == "update 50: 0.000"
    # Steps that are alone in "the trainer's own" partition are not marked; the recorded neighbours are outlined.
    page.locator("#cells .cell").nth(3).click()
    assert page.locator("#cells .alone").count() == 0
    assert "no peers" not in page.inner_text("#timeline") + page.inner_text("#steps tbody")
    assert page.locator("#cluster").is_hidden() and page.locator("#steps thead").inner_text().split()[4] == "V̂"
    assert page.locator("#steps tbody td:nth-child(2)").all_inner_texts()[:2] == ["0.000", "0.250"]
    assert page.locator("#cells .cell").evaluate_all("all => all.map(x => x.matches('.peer'))") == [False] * 5 + [True]
    assert page.inner_text("#reason tbody").split() == ["0.750", "0.500", "−2.875", "+0.500"]
    assert page.locator("#neighbours tbody tr").all_inner_texts() == ["2 · 1\ttake(key, 2)\t0.000\t0.750"]
    assert page.text_content("#action").startswith("so <action> ")  # lists show calls and what stands between tags
    for width in (360, 1280, 2560):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(200)
        assert page.evaluate(CUT) == [], width
    equal = "columns.trained.returns.fill(0.1), columns.trained.value.fill(0), explained([0, 1, 2])"
    assert page.evaluate(equal) is None  # not the rounding of their mean
