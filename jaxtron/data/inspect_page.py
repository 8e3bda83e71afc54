"""The inspection report as one self-contained HTML page."""

from html import escape

from jaxtron.data.inspect import Report
from jaxtron.data.inspect_parts import Lengths

_STYLE = """
:root { color-scheme: light dark; --bar: #3b6fb6; --muted: #6b7280; --bad: #b42318; }
@media (prefers-color-scheme: dark) { :root { --bar: #7aa7e8; --muted: #9ca3af; --bad: #f97066; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 54rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.25rem; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin-top: 2rem; }
th { text-align: left; font-weight: 500; color: var(--muted); padding-right: 2rem; }
td, th { vertical-align: top; padding-block: .15rem; }
td { font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; }
svg rect { fill: var(--bar); }
svg text { fill: currentColor; font: 12px system-ui, sans-serif; }
.bad { color: var(--bad); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid var(--bar);
      margin: .25rem 0 1.25rem; padding: .25rem .75rem; }
""".strip()

_ROW = 22  # height of a bar with its gap [px]
_LABELS = 150  # width of the label column [px]
_BARS = 480  # width of the longest bar [px]


def page(report: Report) -> str:
    """The report as HTML, with nothing loaded from elsewhere."""
    facts = "\n".join(
        f"<tr><th scope='row'>{escape(name)}</th><td>{escape(value)}</td></tr>"
        for name, value in report.facts()
    )
    parts = [
        "<!doctype html>",
        "<html lang='en'>",
        "<head>",
        "<meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'>",
        f"<title>{escape(report.prefix)}</title>",
        f"<style>\n{_STYLE}\n</style>",
        "</head>",
        "<body>",
        f"<h1>{escape(report.prefix)}</h1>",
        f"<table>\n{facts}\n</table>",
    ]
    if report.bad_ids:
        items = "\n".join(f"<li>{escape(line)}</li>" for line in report.bad_id_lines())
        parts += ["<h2 class='bad'>Ids out of range</h2>", f"<ul class='bad'>\n{items}\n</ul>"]
    parts += ["<h2>Documents by length [tokens]</h2>", _histogram(report.lengths)]
    if report.samples:
        parts.append("<h2>Samples</h2>")
    for sample in report.samples:
        parts.append(f"<div>{escape(sample.heading)}</div>")
        # A leading newline directly after <pre> is dropped by HTML, so give it one to drop.
        parts.append(f"<pre>\n{escape(sample.text)}</pre>")
    parts += ["</body>", "</html>"]
    return "\n".join(parts) + "\n"


def _histogram(lengths: Lengths) -> str:
    most = max((b.documents for b in lengths.histogram), default=1)
    rows = []
    for number, b in enumerate(lengths.histogram):
        top = number * _ROW
        width = b.documents / most * _BARS
        rows.append(
            f"<text x='{_LABELS - 8}' y='{top + 15}' text-anchor='end'>{b.label}</text>"
            f"<rect x='{_LABELS}' y='{top + 3}' width='{width:.1f}' height='{_ROW - 6}' rx='2'/>"
            f"<text x='{_LABELS + width + 6:.1f}' y='{top + 15}'>{b.documents}</text>"
        )
    height = max(1, len(rows)) * _ROW
    bars = "\n".join(rows)
    return (
        f"<svg viewBox='0 0 {_LABELS + _BARS + 90} {height}' role='img' "
        f"aria-label='Number of documents by length'>\n{bars}\n</svg>"
    )
