// Measures the page with all details open. Text may overlap lines and bars, but not other text.
addEventListener("load", () => {
  document.querySelectorAll("details").forEach(d => d.open = true);
  const found = {page: [document.documentElement.scrollWidth, innerWidth], cut: [], outside: [],
                 overlaps: [], texts: 0};
  for (const box of document.querySelectorAll(".scroll, .card, pre"))
    if (box.scrollWidth > box.clientWidth + 1)
      found.cut.push((box.querySelector("table") || box).id + " " + box.className);
  for (const svg of document.querySelectorAll("figure svg")) {
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].filter(t => t.textContent.trim());
    const boxes = texts.map(t => [t.textContent, t.getBoundingClientRect()]);
    found.texts += boxes.length;
    boxes.forEach(([name, b], i) => {
      if (b.left < frame.left - 1 || b.right > frame.right + 1 || b.top < frame.top - 1 ||
          b.bottom > frame.bottom + 1) found.outside.push(name);
      for (const [other, c] of boxes.slice(i + 1)) {
        const wide = Math.min(b.right, c.right) - Math.max(b.left, c.left);
        const high = Math.min(b.bottom, c.bottom) - Math.max(b.top, c.top);
        if (wide > 1 && high > 3) found.overlaps.push(name + " / " + other);
      }
    });
  }
  top.document.body.textContent = "PROBE" + JSON.stringify(found) + "ENDPROBE";
});
