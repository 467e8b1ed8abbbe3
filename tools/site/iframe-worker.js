// Browsers do not start workers from files. For pages opened from a disk the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      const script = src => new Promise((resolve, reject) => {
        const s = frame.contentDocument.createElement("script")
        Object.assign(s, { src, onload: resolve, onerror: reject })
        frame.contentDocument.body.append(s)
      })
      inside.importScripts = (...urls) => urls.reduce((before, u) => before.then(() => script(u)), Promise.resolve())
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.ready = script(url)
      this.inside = inside
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {}
  }
}
