// What Dash does not do by itself. A file goes to the studio as it is, outside of Dash: no base64, and what is too large is said so.
(function () {
  const base = location.pathname.replace(/[^/]*$/, "");
  const say = text => {
    const p = document.getElementById("upload-says");
    if (p) p.textContent = text;
  };
  async function send(file) {
    say("Reading " + file.name + " …");
    try {
      const answer = await fetch(base + "upload?name=" + encodeURIComponent(file.name), {
        method: "POST",
        body: file,
      });
      const found = await answer
        .json()
        .catch(() => ({
          error: answer.status === 413 ? file.name + " is too large" : "the studio refused " + file.name,
        }));
      if (found.error) return say(found.error);
      say(found.name + " is loaded");
      window.dash_clientside.set_props("uploaded", { data: found });
    } catch (error) {
      say(file.name + " could not be sent: it is too large, or the studio was closed");
    }
  }
  function fill() {
    const box = document.getElementById("drop");
    if (!box || box.firstChild) return;
    const label = document.createElement("label"),
      input = document.createElement("input");
    input.type = "file";
    input.id = "file";
    label.htmlFor = "file";
    label.textContent = "Drop a trace or graph here, or choose one";
    input.addEventListener("change", () => {
      if (input.files.length) send(input.files[0]);
    });
    box.addEventListener("dragover", e => {
      e.preventDefault();
      box.classList.add("over");
    });
    box.addEventListener("dragleave", () => box.classList.remove("over"));
    box.addEventListener("drop", e => {
      e.preventDefault();
      box.classList.remove("over");
      if (e.dataTransfer.files.length) send(e.dataTransfer.files[0]);
    });
    box.append(label, input);
  }
  // Dash says of lists of boxes that they are list boxes, which they are not: each box is its own.
  const NAMES = { steps: "Steps", changes: "Changes", chosen: "Scenarios to forget" };
  function mend() {
    for (const [id, name] of Object.entries(NAMES)) {
      const list = document.getElementById(id);
      if (list && list.getAttribute("role") !== "group") {
        list.setAttribute("role", "group");
        list.setAttribute("aria-label", name);
      }
      if (list)
        list.querySelectorAll("label[role], label[aria-selected]").forEach(label => {
          label.removeAttribute("role");
          label.removeAttribute("aria-selected");
        });
    }
  }
  const renew = () => {
    fill();
    mend();
  };
  new MutationObserver(renew).observe(document.documentElement, {
    childList: true,
    subtree: true,
    attributes: true,
    attributeFilter: ["role", "aria-selected"],
  });
  document.addEventListener("DOMContentLoaded", () => {
    document.documentElement.lang = "en";
    renew();
  });
})();
