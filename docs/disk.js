// A page that is opened from disk may start no worker: there the search runs in a frame of its own.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      const source = new URL(url, location.href).href
      frame.srcdoc =
        "<script>window.postMessage = data => parent.dispatchEvent(new CustomEvent('from-search', { detail: data }))" +
        `</script><script src="${source}"></script>`
      this.ready = new Promise(resolve => frame.addEventListener("load", () => resolve(frame.contentWindow)))
      window.addEventListener("from-search", event => {
        const message = new MessageEvent("message", { data: event.detail })
        this.dispatchEvent(message)
        if (this.onmessage) this.onmessage(message)
      })
      document.documentElement.append(frame)
    }

    postMessage(data) {
      this.ready.then(inside => inside.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {}
  }
}
