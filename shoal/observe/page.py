"""The look of a page that is one file: its style, its small script, and the frame around what it says.

Nothing is fetched: the page's own policy forbids it, and lets no script run but ours.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark; --back: #fbfbfa; --card: #fff; --ink: #1d1d1b; --soft: #5d5d58; --line: #dededa;
  --c1: #1f66cf; --c2: #b4500a; --c3: #c01f2e; --good: #1a7340; }
@media (prefers-color-scheme: dark) { :root { --back: #131517; --card: #1b1e21; --ink: #e8e8e5; --soft: #a3a6a8;
  --line: #34383c; --c1: #73aefc; --c2: #f2a25c; --c3: #ff7f86; --good: #6fd397; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 28px 24px 56px; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 23px; line-height: 1.3; margin: 0 0 4px; overflow-wrap: anywhere; max-width: 60ch; }
h2 { font-size: 17px; margin: 36px 0 10px; }
.where { color: var(--soft); margin: 0; overflow-wrap: anywhere; }
.state { display: inline-block; border: 1px solid; border-radius: 99px; padding: 0 10px; font-size: 13px;
  margin-bottom: 10px; color: var(--soft); }
.state.finished { color: var(--good); } .state.failed, .state.gone { color: var(--c3); }
.state.running { color: var(--c1); } .state.stopped { color: var(--c2); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(158px, 1fr)); gap: 10px; margin: 22px 0 12px; }
.tiles div, figure { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.tiles div { padding: 10px 14px; } .tiles dt, .tiles dd.also { color: var(--soft); font-size: 13px; }
.tiles dd { margin: 0; } .tiles dd.value { font-size: 21px; line-height: 1.3; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: 1fr 1fr; gap: 12px; }
figure { margin: 0; padding: 12px 16px 8px; min-width: 0; } figure:first-child { grid-column: 1 / -1; }
figcaption { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 14px; margin-bottom: 16px; }
.keys { display: flex; flex-wrap: wrap; gap: 2px 14px; color: var(--soft); font-size: 13px; }
.key i { display: inline-block; width: 14px; height: 0; border-top: 2px solid; margin-right: 5px; vertical-align: middle; }
.key i.faint { opacity: .45; } .key i.dots { width: 8px; height: 8px; border: 4px solid; border-radius: 4px; }
.key i.upright { width: 0; height: 12px; border: 0; border-left: 1px dashed; }
.key i.crosses { width: 2px; height: 10px; border: 1px solid; }
.chart { position: relative; height: 190px; margin: 0 16px 0 46px; } figure:first-child .chart { height: 270px; }
.chart > svg { width: 100%; height: 100%; overflow: visible; display: block; }
.chart text { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
.under { margin: 20px 0 0; text-align: center; color: var(--soft); font-size: 12px; }
.none { color: var(--soft); }
polyline { fill: none; stroke-width: 1.8; stroke-linejoin: round; vector-effect: non-scaling-stroke; }
polyline.faint { stroke-width: 1; opacity: .45; }
.grid { stroke: var(--line); } .mark { stroke: var(--soft); stroke-dasharray: 3 4; } .cross { stroke-width: 2; }
polyline.c1, .cross.c1 { stroke: var(--c1); } circle.c1, rect.c1 { fill: var(--c1); } i.c1 { color: var(--c1); }
polyline.c2, .cross.c2 { stroke: var(--c2); } circle.c2, rect.c2 { fill: var(--c2); } i.c2 { color: var(--c2); }
polyline.c3, .cross.c3 { stroke: var(--c3); } circle.c3, rect.c3 { fill: var(--c3); } i.c3 { color: var(--c3); }
circle { stroke: var(--card); stroke-width: 1.5; }
.tip { position: absolute; padding: 2px 8px; border-radius: 5px; background: var(--ink); color: var(--back);
  font-size: 13px; white-space: nowrap; pointer-events: none; transform: translate(-50%, -150%); z-index: 1; }
.dot { position: absolute; width: 9px; height: 9px; margin: -4.5px; border-radius: 5px; background: var(--ink);
  pointer-events: none; }
.wide { overflow-x: auto; max-height: 420px; overflow-y: auto; border: 1px solid var(--line); border-radius: 8px;
  background: var(--card); }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 6px 14px; vertical-align: top; border-bottom: 1px solid var(--line); }
tbody tr:last-child td { border-bottom: 0; } th { color: var(--soft); font-weight: 500; } th, td { white-space: nowrap; }
td:last-child { white-space: normal; overflow-wrap: anywhere; min-width: 240px; }
.numbers td, .numbers th { text-align: right; min-width: 0; white-space: nowrap; }
pre { margin: 0; padding: 12px 16px; overflow: auto; max-height: 420px; border: 1px solid var(--line);
  border-radius: 8px; background: var(--card); font: 13px/1.5 ui-monospace, monospace; }
header pre { white-space: pre-wrap; overflow-wrap: anywhere; }
section > p + pre, .wide + pre, header pre { margin-top: 12px; }
details { margin-top: 10px; } summary { cursor: pointer; margin-bottom: 8px; }
:focus-visible { outline: 2px solid var(--c1); outline-offset: 2px; }
@media (max-width: 720px) { body { padding: 18px 12px 40px; } .charts { grid-template-columns: 1fr; }
  figure:first-child .chart { height: 220px; } h1 { font-size: 19px; } .tiles { grid-template-columns: 1fr 1fr; }
  figure { padding: 10px 10px 6px; } th, td { padding: 6px 10px; } .stack thead { display: none; }
  .stack tr { display: flex; flex-wrap: wrap; column-gap: 16px; padding: 6px 10px; border-bottom: 1px solid var(--line); }
  .stack td { padding: 0; border: 0; } .stack td:last-child { flex-basis: 100%; } .stack tr:last-child { border: 0; }
  .events td:nth-child(3):not(:empty)::before, .checkpoints td:first-child:not(:empty)::before { content: 'step '; } }
"""

SCRIPT = """
for (const chart of document.querySelectorAll('.chart')) {
  const values = chart.dataset.values.split('\\n').map(line => line.split('|'));
  const tip = document.createElement('output'), dot = document.createElement('span');
  tip.className = 'tip'; dot.className = 'dot'; chart.append(dot, tip);
  let at = 0;
  const show = index => {
    at = Math.max(0, Math.min(values.length - 1, index));
    const [x, y, text] = values[at];
    tip.hidden = dot.hidden = false;
    tip.textContent = text;
    dot.style.left = x + '%'; dot.style.top = tip.style.top = y + '%';
    const half = tip.offsetWidth / 2, middle = x / 100 * chart.clientWidth;
    tip.style.left = Math.max(half - 46, Math.min(chart.clientWidth + 10 - half, middle)) + 'px';
  };
  const hide = () => { tip.hidden = dot.hidden = true; };
  hide();
  chart.tabIndex = 0;
  chart.addEventListener('pointermove', event => {
    const box = chart.getBoundingClientRect();
    const far = ([x, y]) => Math.hypot(x / 100 * box.width + box.left - event.clientX,
      (y / 100 * box.height + box.top - event.clientY) / 4);
    let best = 0;
    values.forEach((value, index) => { if (far(value) < far(values[best])) best = index; });
    show(best);
  });
  chart.addEventListener('pointerleave', hide);
  chart.addEventListener('blur', hide);
  chart.addEventListener('focus', () => { if (chart.matches(':focus-visible')) show(at); });
  chart.addEventListener('keydown', event => {
    const go = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - 20, PageDown: at + 20, Home: 0,
      End: values.length - 1, Escape: -1 }[event.key];
    if (go === undefined) return;
    event.preventDefault();
    if (event.key === 'Escape') hide(); else show(go);
  });
}
"""


def page(title: str, body: str, *, style: str = "", script: str = SCRIPT) -> str:
    """A whole document around `body`, which is HTML; `style` is added to the common one."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def section(heading: str, *parts: str) -> str:
    """A heading and what is below it; nothing if there is nothing below it."""
    return f"<section>\n<h2>{escape(heading)}</h2>\n{''.join(parts)}\n</section>" if any(parts) else ""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], label: str, kind: str = "") -> str:
    """A table in a box that scrolls; a narrow page shows the rows of one of kind `stack` as blocks.

    Cells are HTML; columns and label are text.
    """
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>\n" for row in rows)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(label)}"><table class="{kind}">'
        f"<thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>"
    )


def text_block(text: str, label: str) -> str:
    """Text as it is, in a box that scrolls."""
    return f'<pre tabindex="0" role="region" aria-label="{escape(label)}">{escape(text)}</pre>'


def folded(summary: str, body: str) -> str:
    """HTML that is shown when its summary is opened."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>" if body else ""
