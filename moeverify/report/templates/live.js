// The page of a run that goes on. It asks its server for a newer state and takes over the content, except while the
// reader's focus is in it. Details that are open stay open.
(() => {
  const BETWEEN = 2000; // milliseconds
  const state = document.getElementById("state");

  function list(root) {
    return Array.from(root.querySelectorAll("details"), (details) => {
      const section = details.closest("section");
      return [`${section ? section.id : ""} ${details.querySelector("summary").textContent}`, details];
    });
  }

  function renew(page) {
    const opened = new Set(list(document).filter(([, details]) => details.open).map(([name]) => name));
    for (const part of ["header", "main", "footer"]) {
      document.querySelector(part).replaceWith(page.querySelector(part));
    }
    for (const [name, details] of list(document)) details.open = opened.has(name);
    document.title = page.title;
    document.dispatchEvent(new Event("renewed"));
  }

  async function follow() {
    try {
      const newest = await (await fetch("version")).text();
      const isRead = document.querySelector("main").contains(document.activeElement);
      if (newest !== state.dataset.version && !isRead) {
        const page = new DOMParser().parseFromString(await (await fetch(".")).text(), "text/html");
        renew(page);
        state.dataset.version = page.getElementById("state").dataset.version;
        state.textContent = page.getElementById("state").textContent;
      }
    } catch (error) {
      state.textContent = "The server of this page has ended.";
      return;
    }
    setTimeout(follow, BETWEEN);
  }
  follow();
})();
