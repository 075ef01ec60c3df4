package accuracy

import "time"

// chart is what was admitted in one scenario.
type chart struct {
	name, title string
	bin         time.Duration
	perfect     []float64 // per second, by bin
	lines       []line
}

type line struct {
	mode  string
	rates []float64
}
