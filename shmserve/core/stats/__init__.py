"""What is counted and measured: statistics of versions, latencies, histograms."""
