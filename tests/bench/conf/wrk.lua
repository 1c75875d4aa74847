-- One machine-readable line after wrk's own report.
done = function(summary, latency, requests)
   local e = summary.errors
   io.write(string.format(
      '\nBENCH {"requests": %d, "duration_us": %d, "bytes": %d, "errors": %d, "p50_us": %.0f, "p99_us": %.0f}\n',
      summary.requests, summary.duration, summary.bytes,
      e.connect + e.read + e.write + e.status + e.timeout,
      latency:percentile(50.0), latency:percentile(99.0)))
end
