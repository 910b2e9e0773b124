"""Style and script of a report's page. The script only shows parts of the page in a panel beside the graphs."""

from __future__ import annotations

from gnncompile.report.look import GREY, PALETTE

STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --text: #1f2328; --soft: #59636e; --line: #d1d9e0; --card: #f6f8fa;
  --box: #ffffff; --edge: #8a929b; --grey: %(grey_light)s; --grey-fill: %(grey_pale)s; }
@media (prefers-color-scheme: dark) { :root { --back: #0d1117; --text: #e6edf3; --soft: #9aa4af; --line: #30363d;
  --card: #161b22; --box: #161b22; --edge: #7d8590; --grey: %(grey_dark)s; --grey-fill: %(grey_deep)s; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
header, main { max-width: 1800px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 18px; }
h1 { font-size: 22px; margin: 0; }
h2 { font-size: 17px; margin: 26px 0 8px; }
h3 { font-size: 15px; margin: 0 0 6px; overflow-wrap: anywhere; }
p { margin: 4px 0; }
.soft, figcaption, th { color: var(--soft); }
code, pre, .line { font-family: ui-monospace, monospace; font-size: 12.5px; }
.line { overflow-wrap: anywhere; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: 10px; margin: 6px 0;
  overflow: auto; max-height: 60vh; line-height: 1.4; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 10px 0; font-size: 13.5px; color: var(--soft); }
.swatch { display: inline-block; width: 13px; height: 13px; border-radius: 3px; vertical-align: -2px;
  border: 2px solid var(--c, var(--edge)); background: var(--f, var(--box)); margin-right: 6px; }
.swatch.structure { border-color: var(--grey); background: var(--grey-fill); }
.swatch.gone { border-style: dashed; border-width: 1px; }
.split { display: grid; grid-template-columns: minmax(0, 1fr) minmax(330px, 30%%); gap: 20px; align-items: start; }
.pair { display: flex; gap: 24px; align-items: flex-start; }
figure { margin: 0; min-width: 0; overflow: auto; padding-bottom: 8px; }
figcaption { font-weight: 600; margin-bottom: 8px; }
svg { display: block; max-width: 100%%; height: auto; }
.full svg.graph { max-width: none; }
#panel { position: sticky; top: 10px; max-height: calc(100vh - 20px); overflow: auto; border: 1px solid var(--line);
  border-radius: 8px; padding: 12px 14px; background: var(--back); }
#panel.pinned { border-color: var(--text); }
#panel pre { max-height: none; }
ul { margin: 4px 0; padding-left: 18px; }
li { overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%%; font-size: 14px; }
th, td { text-align: left; padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; }
td.number, th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
article { border-left: 4px solid var(--c, var(--edge)); padding: 2px 0 2px 14px; margin: 16px 0; }
summary { cursor: pointer; }
button { font: inherit; font-size: 13px; color: var(--text); background: var(--card); border: 1px solid var(--line);
  border-radius: 6px; padding: 2px 10px; cursor: pointer; }
.route { fill: none; stroke: var(--edge); stroke-width: 1; }
.head { fill: var(--edge); }
.box rect { fill: var(--f, var(--box)); stroke: var(--c, var(--edge)); stroke-width: 1; }
.box.region rect { stroke-width: 2; }
.box.structure rect { fill: var(--grey-fill); stroke: var(--grey); }
.box.gone rect { stroke-dasharray: 4 3; }
.box .mark { fill: var(--grey); stroke: none; }
.box text { fill: var(--text); font: 12.5px system-ui, sans-serif; text-anchor: middle; }
.box text.result { fill: var(--soft); font-size: 10.5px; }
.box { cursor: pointer; outline: none; }
.box:hover rect, .box:focus-visible rect, .box.chosen rect { stroke-width: 3.2; }
.dimmed .box.region:not(.same) { opacity: 0.35; }
.bar { fill: var(--c, var(--edge)); }
.bar.limit { fill: var(--text); opacity: 0.55; }
.bar.unfused { fill: var(--grey); opacity: 0.6; }
@media (max-width: 1000px) { .split { grid-template-columns: minmax(0, 1fr); } .pair { flex-wrap: wrap; }
  #panel { position: static; max-height: none; } }
""" % {"grey_light": GREY.light, "grey_pale": GREY.pale, "grey_dark": GREY.dark, "grey_deep": GREY.deep}  # noqa: UP031

SCRIPT = """
"use strict";
const panel = document.getElementById("panel");
const boxes = [...document.querySelectorAll("g.box")];
const hint = [...panel.childNodes];
let pinned = null;
for (const box of boxes) box.querySelector("title").remove();  // the panel says it
function show(box) {
  const region = box.dataset.region;
  const about = document.getElementById(box.dataset.about).content.cloneNode(true);
  panel.replaceChildren(about);
  const article = region && document.getElementById("region-" + region);
  if (article) for (const part of article.querySelectorAll(".kernel")) panel.append(part.cloneNode(true));
  const source = panel.querySelector("details.source");
  if (source) source.open = true;
  for (const other of boxes) {
    other.classList.toggle("chosen", other === box);
    other.classList.toggle("same", Boolean(region) && other.dataset.region === region);
  }
  document.body.classList.toggle("dimmed", Boolean(region));
  panel.scrollTop = 0;
}
function clear() {
  pinned = null;
  panel.classList.remove("pinned");
  panel.replaceChildren(...hint);
  document.body.classList.remove("dimmed");
  for (const box of boxes) box.classList.remove("chosen", "same");
}
function pin(box) {
  if (pinned === box) return clear();
  pinned = box;
  panel.classList.add("pinned");
  show(box);
}
for (const box of boxes) {
  box.addEventListener("mouseenter", () => pinned || show(box));
  box.addEventListener("focus", () => pinned || show(box));
  box.addEventListener("click", () => pin(box));
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); pin(box); }
  });
}
document.addEventListener("keydown", (event) => { if (event.key === "Escape") clear(); });
document.getElementById("size").addEventListener("click", (event) => {
  const full = document.body.classList.toggle("full");
  event.target.textContent = full ? "fit to the page" : "full size";
});
"""


def colours() -> str:
    """Returns CSS with a class for each colour of a region, for light and dark pages."""
    light = "".join(f".r{k} {{ --c: {c.light}; --f: {c.pale}; }}\n" for k, c in enumerate(PALETTE))
    dark = "".join(f".r{k} {{ --c: {c.dark}; --f: {c.deep}; }}\n" for k, c in enumerate(PALETTE))
    return f"{light}@media (prefers-color-scheme: dark) {{\n{dark}}}\n"
