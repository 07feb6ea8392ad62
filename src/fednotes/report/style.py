"""The style sheet of the report: one column, light, dark and print.

The six looks are from Okabe and Ito's palette (told apart with every common colour vision),
and differ by dash and marker as well, so that they survive a black and white printer.
"""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #fbfbf9; --panel: #ffffff; --ink: #1c2126; --soft: #59636e; --line: #dfe3e6;
  --grid: #e9ecee; --accent: #0072b2; --good: #00704f; --bad: #a8480a;
  --c0: #5f6b78; --c1: #0072b2; --c2: #c85200; --c3: #00835f; --c4: #a3487f; --c5: #7d6608;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171a; --panel: #1b1f23; --ink: #e7eaec; --soft: #a0abb5; --line: #343b42;
    --grid: #2a3036; --accent: #56b4e9; --good: #4fd1a5; --bad: #f4a261;
    --c0: #a9b4bf; --c1: #56b4e9; --c2: #f28e3c; --c3: #35c39b; --c4: #e28fc2; --c5: #e3cf57;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
main { max-width: 68rem; margin: 0 auto; padding: 2.5rem 1.5rem 4rem; }
h1 { font-size: 2rem; line-height: 1.2; margin: .2rem 0 .5rem; letter-spacing: -.015em; }
h2 { font-size: 1.3rem; margin: 3rem 0 .4rem; letter-spacing: -.01em; }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
p { max-width: 46rem; margin: .4rem 0 .8rem; }
.kicker { color: var(--accent); font-weight: 600; font-size: .85rem; margin: 0; }
.soft, figcaption, .source { color: var(--soft); }
code { font: .88em/1.5 ui-monospace, "Cascadia Code", Menlo, Consolas, monospace;
  overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.6rem, 1fr)); gap: .8rem;
  margin: 1.6rem 0 0; padding: 0; }
.tiles div { background: var(--panel); border: 1px solid var(--line); border-radius: .5rem;
  padding: .7rem .9rem; }
.tiles dt { color: var(--soft); font-size: .85rem; }
.tiles dd { margin: 0; font-size: 1.3rem; font-weight: 600; line-height: 1.4; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.tiles dd small { display: block; white-space: normal; font-size: .82rem;
  font-weight: 400; color: var(--soft); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .34rem .6rem; text-align: right; white-space: nowrap; }
th { font-weight: 600; }
thead th { color: var(--soft); font-weight: 500; border-bottom: 1px solid var(--line);
  vertical-align: bottom; }
thead tr:first-child th[colspan] { border-bottom: 1px solid var(--grid); text-align: center; }
tbody { border-bottom: 1px solid var(--line); }
tbody th, thead th.text { text-align: left; }
tbody th[rowspan] { vertical-align: top; }
tbody th.sub, tbody th.key { font-weight: 400; }
tbody th.key { color: var(--soft); }
.settings td { text-align: left; white-space: pre-wrap; overflow-wrap: anywhere; }
.settings { width: auto; }
tbody.mean { background: var(--panel); }
td small { display: block; color: var(--soft); font-weight: 400; line-height: 1.1; }
td[rowspan] { vertical-align: top; }
td.best { font-weight: 700; }
td.up { color: var(--good); } td.down { color: var(--bad); }
figure { margin: 1rem 0 1.8rem; }
figcaption { font-size: .88rem; margin-top: .5rem; max-width: 46rem; }
.source { display: block; font-size: .8rem; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr));
  gap: 1rem; }
.panels svg, .panel svg { background: var(--panel); border: 1px solid var(--line);
  border-radius: .5rem; padding: .6rem; }
.panels svg { width: 100%; height: auto; }
.panel svg { width: 100%; height: auto; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.3rem; list-style: none; padding: 0;
  margin: .6rem 0; font-size: .9rem; }
.legend li { display: flex; align-items: center; gap: .45rem; }
svg text { font: 11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  fill: var(--soft); font-variant-numeric: tabular-nums; }
svg text.chart-title { font-size: 12.5px; font-weight: 600; fill: var(--ink); }
svg text.label { font-size: 12px; fill: var(--ink); }
svg .end { text-anchor: end; } svg .middle { text-anchor: middle; }
svg .grid { stroke: var(--grid); fill: none; } svg .axis { stroke: var(--soft); fill: none; }
svg .span { stroke: var(--line); stroke-width: 2; fill: none; }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); } .c2 { stroke: var(--c2); }
.c3 { stroke: var(--c3); } .c4 { stroke: var(--c4); } .c5 { stroke: var(--c5); }
.curve.c0 { stroke-dasharray: 5 4; } .curve.c2 { stroke-dasharray: 1.5 4; }
.curve.c3 { stroke-dasharray: 9 4; } .curve.c4 { stroke-dasharray: 9 3 2 3; }
.curve.c5 { stroke-dasharray: 3 3; }
.mark { stroke-width: 1.8; }
.mark.c0 { fill: var(--panel); } .mark.c1 { fill: var(--c1); } .mark.c2 { fill: var(--c2); }
.mark.c3 { fill: var(--panel); } .mark.c4 { fill: var(--c4); } .mark.c5 { fill: none; }
details { margin: .6rem 0 1.6rem; } summary { cursor: pointer; font-weight: 600; }
footer { margin-top: 3.5rem; font-size: .85rem; color: var(--soft); }
@media (max-width: 40rem) { main { padding: 1.4rem 1rem 3rem; } h1 { font-size: 1.6rem; } }
@media print {
  :root { --page: #fff; --panel: #fff; --ink: #000; --soft: #444; --line: #bbb; --grid: #ddd;
    --accent: #0072b2; --good: #000; --bad: #000;
    --c0: #5f6b78; --c1: #0072b2; --c2: #c85200; --c3: #00835f; --c4: #a3487f; --c5: #7d6608; }
  body { font-size: 10.5pt; } main { padding: 0; max-width: none; }
  figure, tr, .tiles div { break-inside: avoid; } h2, h3 { break-after: avoid; }
  .panels svg { break-inside: avoid; }
  .panels { grid-template-columns: repeat(2, 1fr); } .wide { overflow: visible; }
  table { font-size: 8.5pt; } th, td { padding: .2rem .35rem; }
}
"""
