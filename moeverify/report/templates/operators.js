// The operators of both sides. Only the lines in sight are elements: all lines have one height.
"use strict";
(() => {
  const HEIGHT = 24;
  const SPARE = 12;
  const MOST_USERS = 30;
  const MOVES = /^(view|_unsafe_view|t|transpose|permute|expand|slice|select|unsqueeze|squeeze|as_strided|detach|alias|split|split_with_sizes|unbind|empty|empty_like|new_empty|memory)\b/;

  // Pairs of (expected, actual) operators of one rank in the order of execution. Either is -1 where there is none.
  function pairRows(data, rank) {
    const compared = data.compared[rank];
    const from = data.expected.length === 1 ? 0 : Math.min(rank, data.expected.length - 1);
    const expected = data.expected[from].operators;
    const taken = new Set();
    for (const each of compared) if (each[1] >= 0 && each[2] === from) taken.add(each[1]);
    const rows = [];
    let next = 0;
    function passUntil(end) {
      for (; next < end; next += 1) if (!taken.has(next)) rows.push({ left: next, leftRank: from, right: -1 });
    }
    data.actual[rank].operators.forEach((op, place) => {
      const [, other, otherRank] = compared[place];
      // What stands alone on the other side comes before the counterpart, within its part of the step.
      if (other >= next && otherRank === from && expected[other][1] === op[1]) passUntil(other);
      rows.push({ left: other, leftRank: otherRank, right: place });
    });
    passUntil(expected.length);
    return rows;
  }

  function makeTexts(data, rank, rows) {
    const text = (index) => data.strings[index];
    function describe(list, place) {
      const op = list.operators[place];
      const lines = op[3].map((site) => list.sites[site]).map((site) => `${text(site[0])}:${site[1]} ${text(site[2])} ${text(site[3])}`);
      return [text(op[0]), text(op[2]), ...lines, ...op[5].filter(Array.isArray).map((each) => text(each[0]))].join(" ");
    }
    return rows.map((row) => [
      row.right >= 0 ? describe(data.actual[rank], row.right) : "",
      row.left >= 0 ? describe(data.expected[row.leftRank], row.left) : "",
    ].join(" ").toLowerCase());
  }

  // The operator that a row is about: that of the rank, or else that of the other side.
  function operatorOf(data, rank, row) {
    return row.right >= 0 ? [data.actual[rank], row.right] : [data.expected[row.leftRank], row.left];
  }

  function outcomeOf(data, rank, row) {
    return row.right >= 0 ? data.outcomes[data.compared[rank][row.right][0]][0] : "alone";
  }

  function isShown(data, rank, row, text, wanted) {
    const [list, place] = operatorOf(data, rank, row);
    const op = list.operators[place];
    const outcome = outcomeOf(data, rank, row);
    const file = op[3].length ? data.strings[list.sites[op[3][0]][0]] : "";
    const module = data.strings[op[2]];
    return (!wanted.phase || data.phases[op[1]] === wanted.phase)
      && (!wanted.outcome || (wanted.outcome === "not" ? outcome !== "match" : outcome === wanted.outcome))
      && (!wanted.module || module === wanted.module || module.startsWith(`${wanted.module}.`))
      && (!wanted.own || (file !== "" && !file.startsWith("moeverify/")))
      && (!wanted.moves || !MOVES.test(data.strings[op[0]]))
      && wanted.words.every((word) => text.includes(word));
  }

  // Headers of parts of the step and of modules, with the rows between them that are not folded.
  function groupLines(data, rank, rows, folded) {
    const lines = [];
    let phase = null;
    let module = null;
    for (const row of rows) {
      const [list, place] = operatorOf(data, rank, row);
      const op = list.operators[place];
      if (!phase || phase.of !== op[1]) {
        phase = { kind: "phase", of: op[1], key: `phase ${row.right} ${row.left}`, count: 0, off: 0 };
        module = null;
        lines.push(phase);
      }
      if (!module || module.of !== op[2]) {
        module = { kind: "module", of: op[2], key: `module ${row.right} ${row.left}`, count: 0, off: 0, phase };
        if (!folded.has(phase.key)) lines.push(module);
      }
      const isOff = outcomeOf(data, rank, row) === "differs";
      for (const header of [phase, module]) {
        header.count += 1;
        header.off += isOff ? 1 : 0;
      }
      if (!folded.has(phase.key) && !folded.has(module.key)) lines.push({ kind: "row", row, phase, module });
    }
    return lines;
  }

  // In a browser `module` is the element with that id.
  if (typeof module === "object" && module.exports) {
    module.exports = { pairRows, makeTexts, isShown, groupLines };
    return;
  }

  const find = (id) => document.getElementById(id);
  const data = JSON.parse(find("operators").textContent);
  const causes = new Set(data.causes.map(([rank, place]) => `${rank} ${place}`));
  const list = find("list");
  const box = find("lines");
  const byRank = new Map();
  const folded = new Set();
  let rank = 0;
  let rows = [];
  let lines = [];
  let selected = null;

  function make(tag, className, text) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  function rowsOf(number) {
    if (!byRank.has(number)) {
      const made = pairRows(data, number);
      byRank.set(number, { rows: made, texts: makeTexts(data, number, made) });
    }
    return byRank.get(number);
  }

  function nameResults(op) {
    return op[4].map(([shape, dtype]) => `${data.strings[dtype]}[${shape.join(", ")}]`).join(" ");
  }

  function nameOperator(side, place) {
    const op = side.operators[place];
    return `#${place} ${data.strings[op[0]]} ${nameResults(op)}`;
  }

  function nameSite(side, site) {
    const [file, line, called] = side.sites[site];
    return `${data.strings[file]}:${line} in ${data.strings[called]}`;
  }

  function nameOutcome(compared) {
    const [outcome, , , , factor, error] = compared;
    const [name] = data.outcomes[outcome];
    if (name === "match") return "match";
    if (name === "multiple") return `${factor} times`;
    return name === "differs" ? `differs by ${error}` : data.outcomes[outcome][1];
  }

  function makeCell(className, text) {
    const cell = make("span", className, text);
    cell.setAttribute("role", "gridcell");
    return cell;
  }

  function drawLine(line, at) {
    const element = make("div", `line ${line.kind === "row" ? "" : "group"} ${line.kind}`);
    element.style.top = `${at * HEIGHT}px`;
    element.setAttribute("role", "row");
    element.setAttribute("aria-rowindex", String(at + 1));
    if (line.kind !== "row") {
      const name = line.kind === "phase" ? data.phases[line.of] : data.strings[line.of] || "outside of modules";
      const off = line.off ? `, ${line.off} differ` : "";
      element.append(makeCell("", `${folded.has(line.key) ? "\u25b8" : "\u25be"} ${name} (${line.count}${off})`));
      element.setAttribute("aria-expanded", String(!folded.has(line.key)));
      element.addEventListener("click", () => fold(line));
      return element;
    }
    const { row } = line;
    const [side, place] = operatorOf(data, rank, row);
    const op = side.operators[place];
    const left = row.left >= 0 ? nameOperator(data.expected[row.leftRank], row.left) : "";
    const right = row.right >= 0 ? nameOperator(data.actual[rank], row.right) : "";
    const compared = row.right >= 0 ? data.compared[rank][row.right] : null;
    element.append(makeCell("", left), makeCell("", right + (compared && data.strings[compared[3]] ? ` (${data.strings[compared[3]]})` : "")));
    element.append(makeCell("", op[3].length ? nameSite(side, op[3][0]) : ""));
    element.append(makeCell(`outcome ${outcomeOf(data, rank, row)}`, compared ? nameOutcome(compared) : "without counterpart"));
    if (row === selected) {
      element.classList.add("selected");
      element.id = "selected";
    }
    element.setAttribute("aria-selected", String(row === selected));
    if (causes.has(`${rank} ${row.right}`)) element.classList.add("cause");
    element.addEventListener("click", () => select(row, false));
    return element;
  }

  function draw() {
    const first = Math.max(0, Math.floor(list.scrollTop / HEIGHT) - SPARE);
    const last = Math.min(lines.length, first + Math.ceil(list.clientHeight / HEIGHT) + 2 * SPARE);
    box.style.height = `${lines.length * HEIGHT}px`;
    box.replaceChildren(...lines.slice(first, last).map((line, at) => drawLine(line, first + at)));
    list.setAttribute("aria-rowcount", String(lines.length));
    list.setAttribute("aria-activedescendant", selected === null ? "" : "selected");
  }

  function arrange() {
    lines = groupLines(data, rank, rows, folded);
    draw();
  }

  function filter() {
    const wanted = {
      words: find("search").value.toLowerCase().split(/\s+/).filter(Boolean),
      phase: find("phase").value,
      outcome: find("outcome").value,
      module: find("module").value.trim(),
      own: find("own").checked,
      moves: find("moves").checked,
    };
    const known = rowsOf(rank);
    rows = known.rows.filter((row, at) => isShown(data, rank, row, known.texts[at], wanted));
    find("count").textContent = `${rows.length} of ${known.rows.length} rows`;
    arrange();
    scrollTo(selected);
  }

  function scrollTo(row) {
    const at = lines.findIndex((line) => row !== null && line.row === row);
    list.scrollTop = Math.max(0, at * HEIGHT - list.clientHeight / 2);
    draw();
  }

  function fold(line) {
    if (!folded.delete(line.key)) folded.add(line.key);
    arrange();
  }

  // Folds or unfolds the module of the selected row, so that the keyboard does all that a click does.
  function foldSelected(folds) {
    const line = groupLines(data, rank, rows, new Set()).find((each) => selected !== null && each.row === selected);
    if (!line) return;
    if (folds) folded.add(line.module.key);
    else for (const header of [line.phase, line.module]) folded.delete(header.key);
    arrange();
    if (!folds) scrollTo(selected);
  }

  function clear() {
    for (const id of ["search", "phase", "outcome", "module"]) find(id).value = "";
    for (const id of ["own", "moves"]) find(id).checked = false;
    filter();
  }

  // Shows a row: filters and folds that hide it go.
  function select(row, scrolls) {
    selected = row;
    if (scrolls) {
      if (!rows.includes(row)) clear();
      folded.clear();
      arrange();
      scrollTo(row);
      list.focus();
    }
    draw();
    showDetails(row);
    if (row.right >= 0) history.replaceState(null, "", `#r${rank}-${row.right}`);
  }

  function jumpTo(isActual, number, place) {
    if (isActual && number !== rank) changeRank(number);
    const row = rowsOf(rank).rows.find((each) => (isActual ? each.right === place : each.left === place && each.leftRank === number));
    if (row) select(row, true);
  }

  function changeRank(number) {
    rank = number;
    find("rank").value = String(number);
    selected = null;
    filter();
  }

  function makeJump(isActual, number, place) {
    const side = isActual ? data.actual[number] : data.expected[number];
    const module = data.strings[side.operators[place][2]];
    const outcome = isActual ? `: ${nameOutcome(data.compared[number][place])}` : "";
    const button = make("button", "jump", nameOperator(side, place) + (module ? ` in ${module}` : "") + outcome);
    button.type = "button";
    button.addEventListener("click", () => jumpTo(isActual, number, place));
    return button;
  }

  function addItems(terms, name, items) {
    if (!items.length) return;
    const all = make("ul");
    for (const item of items) {
      const entry = make("li");
      entry.append(item);
      all.append(entry);
    }
    const value = make("dd");
    value.append(all);
    terms.append(make("dt", "", name), value);
  }

  function describeSide(isActual, number, place) {
    const section = make("section");
    const side = isActual ? data.actual[number] : data.expected[number];
    const ranks = (isActual ? data.actual : data.expected).length;
    section.append(make("h2", "", data.names[isActual ? 1 : 0] + (ranks > 1 ? `, rank ${number}` : "")));
    if (place < 0) {
      section.append(make("p", "dim", "no such operator"));
      return section;
    }
    const op = side.operators[place];
    const terms = make("dl");
    addItems(terms, "operator", [nameOperator(side, place)]);
    addItems(terms, "part", [data.phases[op[1]]]);
    if (data.strings[op[2]]) addItems(terms, "module", [data.strings[op[2]]]);
    if (isActual) {
      const compared = data.compared[number][place];
      addItems(terms, "result", [[nameOutcome(compared), data.strings[compared[3]], compared[5] === null ? "" : `error ${compared[5]}`].filter(Boolean).join(", ")]);
    }
    if (op[7].length) addItems(terms, "ranks", [op[7].join(", ") + (data.strings[op[8]] ? ` (${data.strings[op[8]]})` : "")]);
    addItems(terms, op[6] >= 0 ? "called for" : "called by", op[3].map((site) => {
      const expression = data.strings[side.sites[site][3]];
      return nameSite(side, site) + (expression ? `: ${expression}` : "");
    }));
    if (op[6] >= 0) addItems(terms, "derives", [makeJump(isActual, number, op[6])]);
    addItems(terms, "takes", op[5].map((each) => (Array.isArray(each) ? data.strings[each[0]] : makeJump(isActual, number, each))));
    const users = [];
    side.operators.forEach((each, at) => each[5].includes(place) && users.length < MOST_USERS && users.push(at));
    addItems(terms, "taken by", users.map((each) => makeJump(isActual, number, each)));
    section.append(terms);
    return section;
  }

  function showDetails(row) {
    find("details").replaceChildren(describeSide(false, row.leftRank, row.left), describeSide(true, rank, row.right));
  }

  function openHash() {
    const match = /^#r(\d+)-(\d+)$/.exec(location.hash);
    if (match && Number(match[1]) < data.actual.length) jumpTo(true, Number(match[1]), Number(match[2]));
  }

  function move(step) {
    const shown = lines.filter((line) => line.kind === "row").map((line) => line.row);
    const at = shown.indexOf(selected);
    const next = shown[Math.min(shown.length - 1, Math.max(0, at + step))];
    if (next) select(next, true);
  }

  data.actual.forEach((_, number) => find("rank").append(new Option(String(number), String(number))));
  const modules = new Set([...data.expected, ...data.actual].flatMap((side) => side.operators.map((op) => op[2])));
  find("modules").append(...[...modules].map((each) => new Option(data.strings[each])));
  for (const id of ["search", "module"]) find(id).addEventListener("input", filter);
  for (const id of ["phase", "outcome", "own", "moves"]) find(id).addEventListener("change", filter);
  find("rank").addEventListener("change", (event) => changeRank(Number(event.target.value)));
  find("fold").addEventListener("click", () => {
    folded.clear();
    for (const line of groupLines(data, rank, rows, folded)) if (line.kind === "module") folded.add(line.key);
    arrange();
  });
  find("unfold").addEventListener("click", () => {
    folded.clear();
    arrange();
  });
  list.addEventListener("scroll", draw);
  list.addEventListener("keydown", (event) => {
    const page = Math.floor(list.clientHeight / HEIGHT);
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -rows.length, End: rows.length }[event.key];
    const folds = { ArrowLeft: true, ArrowRight: false }[event.key];
    if (step === undefined && folds === undefined) return;
    event.preventDefault();
    if (step === undefined) foldSelected(folds);
    else move(step);
  });
  addEventListener("resize", draw);
  addEventListener("hashchange", openHash);
  find("controls").addEventListener("submit", (event) => event.preventDefault());
  find("controls").hidden = false;
  if (data.causes.length) find("causes").append("First wrong: ");
  for (const [number, place] of data.causes) {
    const button = makeJump(true, number, place);
    button.textContent = `rank ${number}: ${button.textContent}`;
    find("causes").append(button, " ");
  }
  changeRank(data.causes.length ? data.causes[0][0] : 0);
  if (location.hash) openHash();
  else if (data.causes.length) jumpTo(true, ...data.causes[0]);
})();
