"""A contact sheet as one self-contained HTML page, without scripts and external resources."""

from __future__ import annotations

from string import Template

from wds_datapipes.cli._meter import plural
from wds_datapipes.cli.show_sheet import Bar, Card, Sheet
from wds_datapipes.parallel.progress import human_bytes
from wds_datapipes.prepare.preview_html import SMALL, escape_text, picture_url

__all__ = ["POLICY", "sheet_as_html"]

#: The size of the histogram in SVG units.
WIDTH, HEIGHT = 640, 120

#: What browsers allow the page: no scripts, and nothing from elsewhere.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; form-action 'self'; base-uri 'none'"

PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="$policy">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
:root {
  --page: #f6f7f9; --card: #ffffff; --ink: #1f2933; --faint: #667380; --line: #dde2e8; --bar: #1f6fb2;
  --chip: #e3eefa; --chip-ink: #17507f; --bad: #b3261e; --well: #eef1f4;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14181d; --card: #1d232a; --ink: #e4e8ec; --faint: #95a1ad; --line: #323b45; --bar: #5aa9e6;
    --chip: #1e3a54; --chip-ink: #b7dbfa; --bad: #ff8a80; --well: #171c22;
  }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 32px clamp(16px, 4vw, 48px) 64px; max-width: 1600px; background: var(--page);
  color: var(--ink); font: 14px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { margin: 0 0 16px; font-size: 22px; line-height: 1.25; overflow-wrap: anywhere; }
h2 { margin: 0 0 10px; font-size: 14px; font-weight: 600; }
.facts { display: flex; flex-wrap: wrap; gap: 6px 28px; margin: 0 0 24px; }
.facts div { display: flex; flex-direction: column; }
dt { color: var(--faint); font-size: 12px; }
dd { margin: 0; font-size: 18px; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr)); gap: 16px;
  margin-bottom: 24px; }
.chart, .card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.chart { padding: 14px 16px; min-width: 0; }
svg { display: block; width: 100%; height: auto; }
svg rect { fill: var(--bar); }
svg line { stroke: var(--line); }
svg text { fill: var(--faint); font-size: 12px; }
.classes { display: grid; grid-template-columns: minmax(0, max-content) 1fr max-content; gap: 4px 10px;
  align-items: center; }
.classes .name { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; max-width: 16em; }
.classes .bar { height: 10px; border-radius: 2px; background: var(--bar); min-width: 2px; }
.classes .count, .size { color: var(--faint); font-variant-numeric: tabular-nums; }
.filters { display: flex; flex-wrap: wrap; gap: 8px 16px; align-items: center; margin-bottom: 16px; }
.filters label { display: inline-flex; gap: 6px; align-items: center; }
.filters input, .filters select, .filters button { font: inherit; color: var(--ink); background: var(--card);
  border: 1px solid var(--line); border-radius: 6px; padding: 4px 8px; max-width: 16em; }
.filters button { cursor: pointer; border-color: var(--bar); }
.filters a, .pages a { color: var(--chip-ink); }
.pages { display: flex; flex-wrap: wrap; gap: 8px 16px; margin: 16px 0; font-variant-numeric: tabular-nums; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(172px, 1fr)); gap: 14px; align-items: start; }
.card { overflow: hidden; min-width: 0; }
.view { height: 172px; display: flex; align-items: center; justify-content: center; background: var(--well);
  border-bottom: 1px solid var(--line); overflow: hidden; }
.view img { max-width: 100%; max-height: 100%; display: block; }
.view img.small { image-rendering: pixelated; width: 100%; height: 100%; object-fit: contain; padding: 16px; }
.view pre { align-self: stretch; flex: 1; margin: 0; padding: 10px; font: 11.5px/1.4 ui-monospace, "DejaVu Sans Mono",
  monospace; white-space: pre-wrap; overflow-wrap: anywhere; overflow: hidden; }
.view pre.bad { color: var(--bad); }
.about { padding: 8px 10px; }
.line { display: flex; justify-content: space-between; gap: 8px; align-items: baseline; }
.key { font-weight: 600; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; min-width: 0; }
.size { white-space: nowrap; font-size: 12px; }
.chip { display: inline-block; max-width: 100%; padding: 0 8px; border-radius: 9px; background: var(--chip);
  color: var(--chip-ink); font-size: 12px; overflow: hidden; text-overflow: ellipsis; white-space: nowrap;
  vertical-align: middle; }
.caption { margin-top: 2px; font-size: 12px; display: -webkit-box; -webkit-line-clamp: 2; -webkit-box-orient: vertical;
  overflow: hidden; overflow-wrap: anywhere; }
details { margin-top: 4px; color: var(--faint); font-size: 12px; }
summary { cursor: pointer; }
details div { margin-top: 4px; overflow-wrap: anywhere; }
details b { color: var(--ink); font-weight: 600; }
.bad { color: var(--bad); }
.none { color: var(--faint); }
</style>
</head>
<body>
<h1>$title</h1>
<dl class="facts">$facts</dl>
$controls<div class="charts">$charts</div>
$pages<div class="cards">
$cards
</div>
$pages</body>
</html>
""")


def sheet_as_html(sheet: Sheet, *, controls: str = "", pages: str = "") -> str:
    """Return the HTML page, in which all contents of the shards are escaped.

    Args:
        sheet: its contents.
        controls: HTML above the charts.
        pages: HTML above and below the samples.
    """
    charts = [_histogram(sheet)] if sheet.bars else []
    if sheet.classes:
        charts.append(_classes(sheet))
    return PAGE.substitute(
        policy=POLICY,
        controls=controls,
        pages=pages,
        title=escape_text(sheet.title),
        facts="".join(
            f"<div><dt>{escape_text(name)}</dt><dd>{escape_text(value)}</dd></div>" for name, value in sheet.facts
        ),
        charts="".join(charts),
        cards="\n".join(map(_card, sheet.cards)) or '<p class="none">There are no samples.</p>',
    )


def _card(card: Card) -> str:
    where = escape_text(f"{card.key}\n{card.shard}")
    chip = (
        f'<span class="chip" title="{escape_text(card.label)}">{escape_text(card.label)}</span>' if card.label else ""
    )
    caption = f'<div class="caption">{escape_text(card.text)}</div>' if card.picture is not None and card.text else ""
    fields = "".join(_field(field.field, field.size, field.kind, field.error) for field in card.fields)
    return (
        f'<div class="card"><div class="view">{_view(card)}</div><div class="about">'
        f'<div class="line"><span class="key" title="{where}">{escape_text(card.key)}</span>'
        f'<span class="size">{human_bytes(card.size)}</span></div>{chip}{caption}'
        f"<details><summary>{plural(len(card.fields), 'field')}</summary>{fields}</details></div></div>"
    )


def _field(name: str, size: int, kind: str, error: str) -> str:
    error_html = f'<br><span class="bad">{escape_text(error)}</span>' if error else ""
    return f"<div><b>{escape_text(name)}</b> {human_bytes(size)}<br>{escape_text(kind)}{error_html}</div>"


def _view(card: Card) -> str:
    picture = card.picture
    if picture is None:
        return f"<pre{' class=bad' if card.failed else ''}>{escape_text(card.text)}</pre>"
    small = ' class="small"' if max(picture.size) <= SMALL else ""
    return f'<img{small} alt="{escape_text(card.key)}" src="{picture_url(picture)}">'


def _histogram(sheet: Sheet) -> str:
    most = max(bar.samples for bar in sheet.bars)
    step = WIDTH / len(sheet.bars)
    bars = "".join(_bar(bar, at * step, step, most) for at, bar in enumerate(sheet.bars))
    low, high = human_bytes(sheet.bars[0].low), human_bytes(sheet.bars[-1].high)
    middle = len(sheet.bars) // 2
    label = f"Samples by size, {'logarithmic' if sheet.logarithmic else 'from the smallest to the largest'}"
    ticks = f'<text x="0" y="{HEIGHT + 16}">{low}</text>'
    if len(sheet.bars) > 2:
        at = human_bytes(sheet.bars[middle].low)
        ticks += f'<text x="{middle * step:.1f}" y="{HEIGHT + 16}" text-anchor="middle">{at}</text>'
    if high != low:
        ticks += f'<text x="{WIDTH}" y="{HEIGHT + 16}" text-anchor="end">{high}</text>'
    return (
        f'<section class="chart"><h2>{label}</h2><svg viewBox="0 0 {WIDTH} {HEIGHT + 20}" role="img" '
        f'aria-label="{label}">{bars}<line x1="0" x2="{WIDTH}" y1="{HEIGHT}" y2="{HEIGHT}"/>{ticks}</svg></section>'
    )


def _bar(bar: Bar, left: float, step: float, most: int) -> str:
    height = max(2.0, (HEIGHT - 4) * bar.samples / most) if bar.samples else 0
    title = f"{human_bytes(bar.low)} to {human_bytes(bar.high)}: {plural(bar.samples, 'sample')}"
    return (
        f'<rect x="{left + 1:.1f}" y="{HEIGHT - height:.1f}" width="{max(1, step - 2):.1f}" '
        f'height="{height:.1f}"><title>{title}</title></rect>'
    )


def _classes(sheet: Sheet) -> str:
    most = sheet.classes[0][1]
    rows = [
        f'<span class="name" title="{escape_text(name)}">{escape_text(name)}</span>'
        f'<span class="bar" style="width: {100 * count / most:.1f}%"></span><span class="count">{count:,}</span>'
        for name, count in sheet.classes
    ]
    if sheet.others:
        rows.append(f'<span class="none">others</span><span></span><span class="count">{sheet.others:,}</span>')
    return (
        f'<section class="chart"><h2>Classes of these samples</h2><div class="classes">{"".join(rows)}</div></section>'
    )
