// What is wrong with what is where on a page: sideways scrolling, text outside the window, text over text.
() => {
  const faults = [], root = document.documentElement;
  const clipped = (e) => e && (getComputedStyle(e).clipPath !== "none" || clipped(e.parentElement));
  const shown = (e) => e.getClientRects().length && !clipped(e);
  const who = (e) => e.tagName.toLowerCase() + (e.id ? "#" + e.id : "") + "." + e.className + " " + JSON.stringify(e.textContent.slice(0, 40));
  if (root.scrollWidth > root.clientWidth) faults.push(`the page scrolls sideways: ${root.scrollWidth} > ${root.clientWidth}`);
  const leaves = [...document.body.querySelectorAll("*")].filter((e) => shown(e) && !["SCRIPT", "STYLE", "OPTION"].includes(e.tagName)
    && [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()));
  const boxes = [];
  for (const e of leaves) {
    const box = e.getBoundingClientRect();
    if (box.right > root.clientWidth + 1 || box.left < -1) faults.push(`outside the window: ${who(e)} ${box.left}..${box.right}`);
    const clip = e.closest(".events");
    const frame = clip ? clip.getBoundingClientRect() : null;
    for (const node of e.childNodes) {
      if (node.nodeType !== 3 || !node.textContent.trim()) continue;
      const range = document.createRange();
      range.selectNodeContents(node);
      for (const r of range.getClientRects()) {
        if (frame && (r.bottom > frame.bottom || r.top < frame.top)) continue;
        if (r.width > 1) boxes.push([r.left + 1, r.top + 2, r.right - 1, r.bottom - 2, e]);
      }
    }
  }
  for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length; j++) {
    const [a, b] = [boxes[i], boxes[j]];
    if (a[4] !== b[4] && a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3]) faults.push(`${who(a[4])} lies over ${who(b[4])}`);
  }
  return faults;
}
