"""The HTML page of a diagnosis: what it must say, and that it is one page that loads nothing."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest

from minite_jax.diagnostics import report
from minite_jax.diagnostics.causes import Cause
from minite_jax.diagnostics.compare import compare
from minite_jax.diagnostics.logs import trace_of_log_probs
from minite_jax.diagnostics.pictures import CHOSEN, Share, shares_of
from minite_jax.diagnostics.trace_file import MemoryTrace, Rows, add_row_set, new_header
from minite_jax.errors import UserError

pytest.importorskip("matplotlib")
TOKENS, LAYERS = 12, 3
BARS = ["What causes the gap", "How much is explained"]


def _trace(changed=(), log_prob_error=0.0, name="<engine & co>"):
    """Two sequences of 6 tokens; the named tensors are off by a third from row 4 on."""
    rows = Rows(np.arange(TOKENS) + 65, np.arange(TOKENS) % 6, np.arange(TOKENS) // 6)
    header = new_header(rows, engine=dict(name=name, recipe="nvfp4", versions=dict(jax="1")))
    scored = np.flatnonzero(np.arange(TOKENS) % 6 < 5)
    add_row_set(header, "scored", scored)
    trace, rng = MemoryTrace(header), np.random.default_rng(0)
    for layer in range(LAYERS):
        for local in ("input", "attention/norm", "attention/norm.codes", "attention/qkv"):
            full = f"layer.{layer}/{local}"
            codes = local.endswith(".codes")
            array = rng.integers(0, 16, (TOKENS, 16)) if codes else rng.normal(size=(TOKENS, 16))
            array = array.astype(np.uint8 if codes else np.float32)
            if full in changed:
                array[4:] = array[4:] ^ 1 if codes else array[4:] * 1.3
            trace.add(full, array)
    log_prob = -rng.exponential(size=len(scored)).astype(np.float32)
    log_prob[3] -= log_prob_error
    trace.add("final/log_prob", log_prob, "scored")
    return trace.close()


class _Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.open, self.links = [], []
        self.feed(text)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.links += [value for key, value in attrs if key in ("src", "href", "xlink:href") and value[:1] != "#"]
        self.links = [link for link in self.links if not link.startswith("data:")]
        if tag not in ("meta", "br", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def _page(*arguments, **options):
    text = report.html_report(*arguments, **options)
    page = _Page(text)
    assert not page.links and "<script" not in text and "@import" not in text  # one file, nothing from elsewhere
    for svg in re.findall(r"<svg.*?</svg>", text, re.S):
        ElementTree.fromstring(svg)
    return text, re.findall(r"<figcaption><b>(.*?)</b>", text)


def test_a_page_with_everything():
    a, b = _trace(), _trace({"layer.1/attention/norm.codes", "layer.1/attention/qkv"}, log_prob_error=0.25)
    shares = [Share("attention/qkv", 0.9, 0.8, 0.95), Share("router", 0.0), Share("router", 0.9, question=CHOSEN)]
    text, figures = _page(a, b, [], compare(a, b), attribution=shares, decode=lambda ids: "".join(map(chr, ids)))
    assert figures == ["Error by layer", "Flipped FP4 codes", "Gap by position", "Probability ratios", *BARS]
    assert "&lt;engine &amp; co&gt;" in text and "<engine" not in text
    text = text.replace("<wbr>", "")
    assert "token_mult_prob_error" in text and "rollout_corr/chi2_token" in text
    assert "layer.1/attention/qkv" in text and 'class="verdict bad"' in text
    # The fourth scored row is sequence 0, position 3: its log-prob is of the token at position 4.
    assert re.search(r"<td>0</td><td>4</td><td>69</td><td>BCDE</td>", text) and "+0.25" in text


def test_long_cells_may_break_and_equal_bits_stand_beside_the_axis():
    a, b = (_trace(changed, name=name) for changed, name in (((), "a"), ({"layer.1/attention/qkv"}, "an engine " * 6)))
    text, _ = _page(a, b, [], compare(a, b))
    assert f'<td class="wide">{"an engine " * 6}</td>' in text and "<td>a</td>" in text
    assert text.count(">equal bits</text>") == 1


def test_equal_traces():
    text, figures = _page(_trace(), _trace(), [], compare(_trace(), _trace()))
    assert "Every common tensor has equal bits" in text and 'class="verdict good"' in text
    assert "Tokens whose log-probs differ most" not in text and "What causes the gap" not in figures


def test_causes_that_make_a_comparison_meaningless():
    text, figures = _page(_trace(), _trace(), [Cause("other token ids", "token 3: 5 <> 6", True)], None)
    assert "Other token ids: token 3: 5 &lt;&gt; 6" in text and figures == []


def test_numbers_that_are_not_finite_are_counted():
    a, b = _trace(), _trace(log_prob_error=np.nan)
    text, _ = _page(a, b, [], compare(a, b))
    assert "1 are not finite and not shown" in text and "gen_kl_error is nan" in text


def test_bars_of_a_table():
    def row(question, swapped, share):
        return dict(question=question, swapped=swapped, share=share, low=share - 1, high=share + 1)

    rows = [row("the gap", "nothing", 0), row("the gap", "everything", 80), row("alone", "head", 30)]
    rows += [row("everything but", "head", 20), row("one after the other", "head", 30), row("a pair, beyond its sum", "a", 1)]
    everything, chosen = Share("everything", 0.8, 0.79, 0.81, CHOSEN), Share("head", 0.3, 0.29, 0.31, CHOSEN)
    assert shares_of({"rows": rows}) == [Share("head", 0.3, 0.29, 0.31), chosen, everything]
    for rows in ([], [{"level": "strict"}], [row("alone", "head", 30) | {"low": "NaN"}]):
        with pytest.raises(UserError, match="the file is no table of shares"):
            shares_of({"rows": rows}, "the file")


def test_log_probs_alone_are_no_rounding_of_operations():
    tokens, mask = np.arange(8).reshape(2, 4) + 65, np.array([[0, 1, 1], [0, 1, 0]], bool)
    traces = [trace_of_log_probs(tokens, x * -np.ones((2, 3)), mask, engine=dict(name=str(x))) for x in (1, 2)]
    assert traces[0].rows.token_ids.tolist() == [65, 66, 67, 68, 69, 70, 71]  # a sequence ends behind its last log-prob
    assert traces[0].row_numbers("final/log_prob").tolist() == [1, 2, 5]
    comparison = compare(*traces)
    everything = Share("everything", 0.8, question=CHOSEN)
    verdict = lambda shares: report._verdict([], comparison, shares)  # noqa: E731
    assert "Log-probs differ; by themselves they do not show where" in verdict([])
    assert "<code>head</code>, <code>gate</code> explain 75 % of the gap" in verdict(
        [Share("head", 0.5, question=CHOSEN), Share("+ gate", 0.75, question=CHOSEN), everything, Share("x", 0.9)]
    )


def test_it_is_written_whole_or_not_at_all(tmp_path):
    a = _trace()
    path = report.write_report(tmp_path / "page.html", a, a, [], compare(a, a))
    assert path.read_text().endswith("</html>\n") and list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError):
        report.write_report(tmp_path / "no folder" / "page.html", a, a, [], compare(a, a))
