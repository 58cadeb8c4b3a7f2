"""The look of a report, light and dark as its reader's system is."""

STYLE = """
:root { color-scheme: light dark;
  --page: #ffffff; --text: #1c2128; --faint: #6a737d; --rule: #d8dee4; --box: #f6f8fa;
  --s0: #2f6fb5; --s1: #d9822b; --s2: #7a8794; --s3: #b8a12e; --s4: #c2453d; --s5: #8a4fb0;
  --s6: #3a9a6b; --s7: #c86fa8; --s8: #4aa3b8; --s9: #8c6d4f; }
@media (prefers-color-scheme: dark) { :root {
  --page: #12161c; --text: #e3e8ee; --faint: #98a2ad; --rule: #323a44; --box: #1b2129;
  --s0: #6aa7e8; --s1: #f0a35a; --s2: #97a3af; --s3: #d8c356; --s4: #ec7a70; --s5: #b98bdc;
  --s6: #67c797; --s7: #e39ccb; --s8: #78c6d8; --s9: #b89878; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 960px; padding: 24px 20px 60px; background: var(--page);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 18px; margin: 38px 0 6px; }
p { margin: 6px 0; } .faint { color: var(--faint); } .bad { color: var(--s4); }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin: 18px 0; }
.tile { background: var(--box); border: 1px solid var(--rule); border-radius: 8px;
  padding: 8px 14px; min-width: 120px; }
.tile b { display: block; font-size: 19px; font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 10px 0; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 14px 3px 0; text-align: right; border-bottom: 1px solid var(--rule);
  white-space: nowrap; }
th { color: var(--faint); font-weight: 500; }
th:first-child, td:first-child { text-align: left; } td.words { text-align: left;
  white-space: normal; }
svg { display: block; width: 100%; height: auto; margin: 8px 0; }
svg text { fill: var(--text); font: 11px system-ui, sans-serif; }
svg .label { text-anchor: end; fill: var(--faint); } svg .tick { fill: var(--faint);
  text-anchor: middle; }
svg .inside { text-anchor: middle; fill: var(--page); font-size: 10px; pointer-events: none; }
svg .level { stroke: var(--rule); } svg .line { fill: none; stroke-width: 1.6; }
svg .edge { stroke: var(--page); stroke-width: 0.4; } svg circle { fill: transparent; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; padding: 0; margin: 6px 0;
  list-style: none; color: var(--faint); font-size: 13px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px;
  margin-right: 5px; }
""" + "".join(
    f".line.s{n} {{ stroke: var(--s{n}); }} rect.s{n} {{ fill: var(--s{n}); }} "
    f"i.s{n} {{ background: var(--s{n}); }} circle.s{n}:hover {{ fill: var(--s{n}); }}\n"
    for n in range(10)
)
