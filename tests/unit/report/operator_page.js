// Runs the script of a page of operators with as much of a document as it uses, does what a reader does, and prints
// what is then to be seen.
"use strict";
const fs = require("fs");

const html = fs.readFileSync(process.argv[2], "utf8");

class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], style: {}, handlers: {}, text: "", value: "", className: "" });
    Object.assign(this, { checked: false, hidden: false, scrollTop: 0, clientHeight: 600 });
    this.classList = { add: (name) => { this.className += ` ${name}`; } };
  }
  set textContent(text) { this.text = text; this.children = []; }
  get textContent() { return this.text + this.children.map((each) => each.textContent ?? each).join("|"); }
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.text = ""; this.children = children; }
  setAttribute() {}
  addEventListener(kind, handler) { (this.handlers[kind] ??= []).push(handler); }
  fire(kind, event = {}) { for (const each of this.handlers[kind] ?? []) each({ target: this, preventDefault() {}, ...event }); }
  focus() {}
  all(tag) { return this.children.flatMap((each) => (each.all ? [...(each.tag === tag ? [each] : []), ...each.all(tag)] : [])); }
}

const ids = {};
for (const [, id] of html.matchAll(/id="([a-z-]+)"/g)) ids[id] = new Element(id);
ids.operators.textContent = html.match(/id="operators">([\s\S]*?)<\/script>/)[1];
globalThis.document = { getElementById: (id) => ids[id], createElement: (tag) => new Element(tag) };
globalThis.Option = class extends Element {};
globalThis.location = { hash: "" };
globalThis.history = { replaceState: (state, title, hash) => { location.hash = hash; } };
globalThis.addEventListener = () => {};
new Function("module", html.match(/<script>([\s\S]*?)<\/script>/)[1])(ids.module);

const lines = () => ids.lines.children;
const rows = () => lines().filter((each) => !each.className.includes("group"));
const lefts = (found) => found.map((each) => each.children[0].textContent);
const having = (name) => lefts(rows().filter((each) => each.className.split(" ").includes(name)));

function filter(id, value) {
  const element = ids[id];
  const key = typeof value === "boolean" ? "checked" : "value";
  const before = element[key];
  element[key] = value;
  element.fire("input");
  element.fire("change");
  const found = lefts(rows());
  element[key] = before;
  element.fire("input");
  element.fire("change");
  return found;
}

const seen = {
  begin: {
    rank: ids.rank.value,
    count: ids.count.textContent,
    lines: lines().map((each) => each.textContent),
    selected: having("selected"),
    marked: having("cause"),
    hash: location.hash,
  },
  search: filter("search", "mul LAYERS.0"),
  phase: filter("phase", "backward"),
  outcome: filter("outcome", "differs"),
  not: filter("outcome", "not"),
  module: filter("module", "layers"),
  own: filter("own", true),
  moves: filter("moves", true),
};
const press = (key) => {
  ids.list.fire("keydown", { key });
  return [lines().length, having("selected")];
};
seen.keys = ["ArrowLeft", "ArrowRight", "ArrowUp", "End"].map(press);
ids.fold.fire("click");
seen.folded = lines().map((each) => each.textContent);
ids.search.value = "all_reduce";
ids.search.fire("input");
ids.details.all("button").find((each) => each.textContent.startsWith("#0 mm.default") && each.textContent.endsWith("match")).fire("click");
seen.jumped = { hash: location.hash, count: ids.count.textContent };
ids.rank.fire("change", { target: { value: "0" } });
seen.other = { rank: ids.rank.value, marked: having("cause") };
process.stdout.write(JSON.stringify(seen));
