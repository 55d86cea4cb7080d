// Typesets what pymdownx.arithmatex marks: \( … \) within a line, \[ … \] in lines of its own.
document.querySelectorAll(".arithmatex").forEach((element) => {
  const source = element.textContent.trim();
  katex.render(source.slice(2, -2), element, { displayMode: source.startsWith("\\["), throwOnError: false });
});
