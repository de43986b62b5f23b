// Runs in the browser of layout.py: PAGES are loaded into a frame, one by one, and measured at each of WIDTHS.
const found = { pages: PAGES.length, tables: 0, scroll: 0, faults: [] }
const frame = document.body.appendChild(document.createElement("iframe"))
frame.style.cssText = "border: 0; height: 900px"
const pause = ms => new Promise(resolve => setTimeout(resolve, ms))
const words = element => element.innerText.trim().replace(/\s+/g, " ").slice(0, 30)

// The frame that shows an element's overflow behind a scroll bar, if there is one.
function scroller(element, view) {
  for (let e = element; e.tagName !== "BODY"; e = e.parentElement) {
    const style = view.getComputedStyle(e)
    if (/auto|scroll/.test(style.overflowX) && style.display !== "table") return e
  }
}

// Where the letters of an element are, without the copy of a formula that is for readers of screens.
function inked(element) {
  const page = element.ownerDocument, texts = page.createTreeWalker(element, NodeFilter.SHOW_TEXT), range = page.createRange()
  const boxes = []
  for (let text; (text = texts.nextNode());)
    if (!text.parentElement.closest(".katex-mathml")) {
      range.selectNodeContents(text)
      boxes.push(...range.getClientRects())
    }
  return boxes
}

function* faults(page, width) {
  const root = page.documentElement, view = page.defaultView
  if (root.scrollWidth > root.clientWidth) yield `the page is ${root.scrollWidth} px wide`
  for (const raw of page.querySelectorAll(".katex-error")) yield `a formula is not set: ${words(raw)}`
  const column = page.querySelector(".md-content__inner")?.getBoundingClientRect()
  for (const element of page.querySelectorAll(".md-typeset :is(table:not([class]), .katex-display, img)")) {
    if (!element.checkVisibility()) continue
    const name = `${element.tagName.toLowerCase()} "${words(element) || element.getAttribute("src")}"`
    const shown = (scroller(element, view) ?? element).getBoundingClientRect()
    if (width > 1000 && element.scrollWidth > element.clientWidth + 1 && element.tagName !== "TABLE") yield `${name} scrolls`
    if (shown.right > column.right + 1) yield `${name} ends ${Math.round(shown.right - column.right)} px outside its column`
    if (element.tagName === "TABLE") yield* table(element, name, shown, width, view)
  }
}

function* table(element, name, shown, width, view) {
  found.tables++
  const hidden = Math.round(element.getBoundingClientRect().right - shown.right)
  if (hidden > 1 && width > 1000) yield `${name} scrolls, ${hidden} px are hidden`
  if (hidden > 1) found.scroll++
  const ours = [...element.rows[0].cells].find(cell => /\bghor\b/.test(cell.innerText))
  if (ours && ours.getBoundingClientRect().right > shown.right + 1) yield `${name}: the column "${words(ours)}" lies outside`
  for (const row of element.rows) {
    let last = -Infinity
    for (const cell of row.cells) {
      const box = cell.getBoundingClientRect()
      if (box.left < last - 1) yield `${name}: the cell "${words(cell)}" lies on the one before`
      last = box.right
      const out = Math.max(0, ...inked(cell).map(r => Math.max(r.right - box.right, box.left - r.left)))
      if (out > 1) yield `${name}: "${words(cell)}" is ${Math.round(out)} px wider than its cell`
    }
  }
  const next = element.closest(".md-typeset__scrollwrap")?.nextElementSibling
  if (next && next.getBoundingClientRect().top < shown.bottom - 1) yield `${name} lies on what comes after it`
}

async function look() {
  for (const path of PAGES) {
    frame.src = "/" + path
    await new Promise(resolve => frame.addEventListener("load", resolve, { once: true }))
    await frame.contentDocument.fonts.ready
    frame.contentDocument.head.append(Object.assign(document.createElement("style"), { textContent: "* { transition: none !important }" }))
    await pause(150)
    for (const width of WIDTHS) {
      frame.style.width = width + "px"
      await pause(100)
      for (const fault of faults(frame.contentDocument, width)) found.faults.push(`${path}, ${width} px: ${fault}`)
    }
  }
}

look().catch(error => found.faults.push(String(error))).then(() => {
  document.body.replaceChildren(Object.assign(document.createElement("pre"), { textContent: JSON.stringify(found) }))
})
