package accuracy

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// chart is what was admitted in one scenario, per second, in the bins of a part of its time.
type chart struct {
	name, title string
	from        time.Duration // of the first bin
	bin         time.Duration
	perfect     []float64
	lines       []line
}

type line struct {
	mode  string
	rates []float64
}

// Sizes of a chart in pixels.
const (
	chartWidth, chartHeight = 860, 360
	plotLeft, plotRight     = 60, 840
	plotTop, plotBottom     = 78, 320
)

// style has one class for each mode, for light and for dark pages. The perfect bucket is the area behind the lines.
const style = `<style>
svg{font:12px system-ui,sans-serif;background:#fff}text{fill:#1f2933}.t{font-size:14px;font-weight:600}.a{fill:#52606d}
.g{stroke:#d5dbe1;stroke-width:1}.p{fill:#dfe5ea}polyline{fill:none;stroke-width:1.6;stroke-linejoin:round}
.shared{stroke:#00796b;stroke-width:2.6}.lease{stroke:#1565c0}.strict{stroke:#7b1fa2}.divide-by-n{stroke:#b26a00}
.redis-per-request{stroke:#607d8b;stroke-dasharray:5 3}.gubernator-global{stroke:#c62828}
@media(prefers-color-scheme:dark){svg{background:#12171d}text{fill:#e4e7eb}.a{fill:#9aa5b1}.g{stroke:#323f4b}.p{fill:#2b3641}
.shared{stroke:#4db6ac}.lease{stroke:#64b5f6}.strict{stroke:#ce93d8}.divide-by-n{stroke:#ffb74d}.redis-per-request{stroke:#b0bec5}.gubernator-global{stroke:#ef9a9a}}
</style>`

// svg draws the chart.
func (c *chart) svg() string {
	top := 0.0
	for _, v := range c.perfect {
		top = max(top, v)
	}
	for _, l := range c.lines {
		for _, v := range l.rates {
			top = max(top, v)
		}
	}
	tick := nice(top / 4)
	top = max(tick*math.Ceil(top/tick), tick)
	span := c.bin.Seconds() * float64(len(c.perfect))
	x := func(t float64) float64 { return plotLeft + (plotRight-plotLeft)*t/span }
	y := func(v float64) float64 { return plotBottom - (plotBottom-plotTop)*v/top }

	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" role="img"><title>%s</title>%s`+"\n", chartWidth, chartHeight, escape(c.title), style)
	fmt.Fprintf(&b, `<text class="t" x="%d" y="22">%s</text>`+"\n", 14, escape(c.title))

	at := float64(plotLeft)
	legend := func(mark, name string) {
		fmt.Fprintf(&b, `%s<text x="%.0f" y="48">%s</text>`+"\n", mark, at+28, name)
		at += 44 + 6.6*float64(len(name))
	}
	legend(fmt.Sprintf(`<rect class="p" x="%.0f" y="39" width="22" height="10"/>`, at), "perfect bucket")
	for _, l := range c.lines {
		legend(fmt.Sprintf(`<polyline class="%s" points="%.0f,44 %.0f,44"/>`, l.mode, at, at+22), l.mode)
	}

	fmt.Fprintf(&b, `<text class="a" x="%d" y="%d">admitted per second</text>`+"\n", plotLeft, plotTop-10)
	for v := 0.0; v <= top*1.001; v += tick {
		fmt.Fprintf(&b, `<line class="g" x1="%d" y1="%.1f" x2="%d" y2="%.1f"/><text class="a" x="%d" y="%.1f" text-anchor="end">%s</text>`+"\n",
			plotLeft, y(v), plotRight, y(v), plotLeft-6, y(v)+4, number(v))
	}
	step := nice(span / 8)
	for t := 0.0; t <= span*1.001; t += step {
		fmt.Fprintf(&b, `<text class="a" x="%.1f" y="%d" text-anchor="middle">%s s</text>`+"\n", x(t), plotBottom+18, number(t+c.from.Seconds()))
	}

	var area strings.Builder
	fmt.Fprintf(&area, "%.1f,%d", x(0), plotBottom)
	for i, v := range c.perfect { // a step for each bin
		fmt.Fprintf(&area, " %.1f,%.1f %.1f,%.1f", x(float64(i)*c.bin.Seconds()), y(v), x(float64(i+1)*c.bin.Seconds()), y(v))
	}
	fmt.Fprintf(&b, `<polygon class="p" points="%s %.1f,%d"/>`+"\n", area.String(), x(span), plotBottom)
	for i := len(c.lines) - 1; i >= 0; i-- { // the first mode on top
		var points []string
		for n, v := range c.lines[i].rates {
			points = append(points, fmt.Sprintf("%.1f,%.1f", x((float64(n)+0.5)*c.bin.Seconds()), y(v)))
		}
		fmt.Fprintf(&b, `<polyline class="%s" points="%s"/>`+"\n", c.lines[i].mode, strings.Join(points, " "))
	}
	b.WriteString("</svg>\n")
	return b.String()
}

// nice is a round number near v: 1, 2 or 5 times a power of ten.
func nice(v float64) float64 {
	if v <= 0 {
		return 1
	}
	unit := math.Pow10(int(math.Floor(math.Log10(v))))
	for _, m := range []float64{1, 2, 5} {
		if v <= m*unit*1.0001 {
			return m * unit
		}
	}
	return 10 * unit
}

func number(v float64) string { return fmt.Sprintf("%g", math.Round(v*1000)/1000) }

func escape(s string) string { return strings.NewReplacer("&", "&amp;", "<", "&lt;").Replace(s) }

// WriteCharts writes one SVG file for each scenario into a folder, which is made if need be.
func (r *Result) WriteCharts(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make the folder of charts: %w", err)
	}
	for i := range r.charts {
		c := &r.charts[i]
		if err := os.WriteFile(filepath.Join(dir, c.name+".svg"), []byte(c.svg()), 0o644); err != nil {
			return fmt.Errorf("write chart: %w", err)
		}
	}
	return nil
}

// Marks in the document, between which WriteDoc writes.
const (
	docBegin = "<!-- results: written by weir bench accuracy -->"
	docEnd   = "<!-- end of results -->"
)

// WriteDoc replaces what stands between the two marks in a Markdown file by the results, with charts from a folder beside it.
func (r *Result) WriteDoc(file, charts string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("read the document: %w", err)
	}
	head, rest, found := strings.Cut(string(text), docBegin)
	_, tail, ended := strings.Cut(rest, docEnd)
	if !found || !ended {
		return fmt.Errorf("write results into %s: it has no %q and %q after it", file, docBegin, docEnd)
	}
	var b strings.Builder
	for i := range r.charts {
		c := &r.charts[i]
		fmt.Fprintf(&b, "\n### %s\n\n%s.\n\n![%s](%s/%s.svg)\n\n", c.name, c.title, c.name, charts, c.name)
		b.WriteString("| mode | demand | perfect | admitted | over | under | usable p99, ms | messages/s per gateway | kB/s per gateway | Redis calls/s |\n")
		b.WriteString("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n")
		for n := range r.Rows {
			x := &r.Rows[n]
			if x.Scenario != c.name {
				continue
			}
			size := "–"
			if x.Bytes != nil && *x.Bytes > 0 {
				size = fmt.Sprintf("%.1f", *x.Bytes/1000)
			}
			usable, messages, redis := cell(x.Usable, "%.0f", 1), cell(x.Messages, "%.1f", 1), cell(x.Redis, "%.0f", 1)
			fmt.Fprintf(&b, "| %s | %d | %d | %d | %.2f %% | %.2f %% | %s | %s | %s | %s |\n", x.Mode, x.Demand, x.Perfect, x.Admitted,
				100*x.Over, 100*x.Under, strings.Replace(usable, "-", "–", 1), messages, size, redis)
		}
	}
	if err := os.WriteFile(file, []byte(head+docBegin+"\n"+b.String()+"\n"+docEnd+tail), 0o644); err != nil {
		return fmt.Errorf("write the document: %w", err)
	}
	return nil
}
