// Rows of long tables stand in <noscript>: a browser with scripts reads them as text, and makes elements of those alone
// that are asked for. Without scripts they are ordinary tables.
"use strict";
(() => {
  const SHOWN_AT_ONCE = 200;

  function fill(details) {
    const source = details.querySelector("noscript");
    if (!source) return;
    const template = document.createElement("template");
    template.innerHTML = source.innerHTML;
    const box = template.content.firstElementChild;
    const body = box.querySelector("tbody");
    const rows = Array.from(body.rows);
    const texts = rows.map((row) => row.textContent.toLowerCase());
    body.replaceChildren();
    source.replaceWith(box);

    const label = document.createElement("label");
    label.textContent = "Filter ";
    const input = document.createElement("input");
    input.type = "search";
    input.placeholder = "words that a row must have";
    label.append(input);
    const count = document.createElement("span");
    count.setAttribute("role", "status");
    count.className = "dim";
    const bar = document.createElement("div");
    bar.className = "filter";
    bar.append(label, count);
    box.before(bar);
    const more = document.createElement("button");
    more.type = "button";
    box.after(more);

    let found = [];
    let shown = 0;
    function showMore() {
      body.append(...found.slice(shown, shown + SHOWN_AT_ONCE));
      shown = Math.min(shown + SHOWN_AT_ONCE, found.length);
      more.hidden = shown === found.length;
      more.textContent = `Show ${Math.min(SHOWN_AT_ONCE, found.length - shown)} more`;
      count.textContent = `${shown} shown of ${found.length}`
        + (found.length < rows.length ? ` that match, ${rows.length} in all` : "");
    }
    function search() {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      found = rows.filter((row, at) => words.every((word) => texts[at].includes(word)));
      body.replaceChildren();
      shown = 0;
      showMore();
    }
    input.addEventListener("input", search);
    more.addEventListener("click", showMore);
    search();
  }

  function openTarget() {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const details = target && target.closest("details");
    if (details) details.open = true;
  }

  // Perfetto's page answers as soon as it can take a trace by message; the trace does not leave the browser.
  function openTrace(event) {
    const link = event.target.closest("a.trace");
    const other = link && window.open(link.href);
    if (!other) return; // the link itself opens the page
    event.preventDefault();
    const file = link.nextElementSibling;
    const { buffer } = Uint8Array.from(atob(file.href.split(",")[1]), (each) => each.charCodeAt(0));
    const asking = setInterval(() => other.closed ? clearInterval(asking) : other.postMessage("PING", link.href), 100);
    addEventListener("message", function answer({ source, data }) {
      if (source !== other || data !== "PONG") return;
      clearInterval(asking);
      removeEventListener("message", answer);
      other.postMessage({ perfetto: { buffer, title: file.download, fileName: file.download } }, link.href);
    });
  }

  function prepare() {
    for (const details of document.querySelectorAll("details.rows")) {
      if (details.open) fill(details);
      details.addEventListener("toggle", () => details.open && fill(details));
    }
  }
  addEventListener("hashchange", openTarget);
  document.addEventListener("click", openTrace);
  document.addEventListener("renewed", prepare);
  prepare();
  openTarget();
})();
