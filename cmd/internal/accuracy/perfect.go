package accuracy

// perfect is one bucket for the whole fleet, asked by every request in the order of arrival: what each mode is measured against. It
// counts in parts of a token, of which one ns earns num, and is exact.
type perfect struct {
	num, den int64 // tokens per ns
	burst    int64
	levels   []level // by key
}

type level struct {
	missing int64 // of a full bucket, in parts of a token; the zero level is full
	at      int64
}

func newPerfect(sc *scenario) *perfect {
	r := sc.limit().Rate
	return &perfect{num: int64(r.Num), den: int64(r.Den), burst: sc.burst, levels: make([]level, sc.keys)}
}

func (p *perfect) take(a *arrival) bool {
	l := &p.levels[a.key]
	l.missing = max(0, l.missing-(a.at-l.at)*p.num)
	l.at = a.at
	if l.missing+p.den > p.burst*p.den {
		return false
	}
	l.missing += p.den
	return true
}

// ideal is what a perfect bucket admits of a scenario's arrivals.
func ideal(sc *scenario, arrivals []arrival) []bool {
	p := newPerfect(sc)
	admitted := make([]bool, len(arrivals))
	for i := range arrivals {
		admitted[i] = p.take(&arrivals[i])
	}
	return admitted
}
