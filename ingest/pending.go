package ingest

import (
	"strings"
	"time"
	"unicode/utf8"

	"github.com/weirhq/weir/schemas"
)

// pending is what is gathered and not yet sealed: normally for a moment, in an outage for as long as it lasts. Counts
// of one key and hour merge, so it grows with keys and hours but not with requests.
type pending struct {
	usage      []schemas.Usage
	usageAt    map[hourKey]int
	tokens     []schemas.Tokens
	tokensAt   map[bucketKey]int
	rejections []schemas.Rejection
	requests   uint64 // in usage
}

type hourKey struct {
	usageKey
	hour int64 // since 1970
}

type bucketKey struct {
	rule, key   string
	incarnation uint32
}

func newPending() pending {
	return pending{usageAt: map[hourKey]int{}, tokensAt: map[bucketKey]int{}}
}

func (p *pending) len() int { return len(p.usage) + len(p.tokens) + len(p.rejections) }

const hour = int64(time.Hour)

func hourOf(u *schemas.Usage) hourKey {
	ns := u.Time.UnixNano()
	h := ns / hour
	if ns%hour < 0 {
		h--
	}
	return hourKey{usageKey{u.Tenant, u.Route, u.Rule, u.Layer}, h}
}

func (p *pending) addUsage(c *cell) {
	u := schemas.Usage{Time: time.Unix(0, c.first).UTC(), Tenant: text(c.key.tenant), Route: text(c.key.route),
		Rule: text(c.key.rule), Layer: text(c.key.layer), Cost: min(c.cost, schemas.MaxCount)}
	if u.Rule == "" {
		u.Layer, u.Allowed = "", c.n
	} else {
		u.Rejected = c.n
	}
	p.requests += c.n
	k := hourOf(&u)
	i, ok := p.usageAt[k]
	// An entry that would leave the bounds of a report goes beside the first; only the newer one grows.
	if ok && p.usage[i].Allowed+u.Allowed <= schemas.MaxCount && p.usage[i].Rejected+u.Rejected <= schemas.MaxCount && p.usage[i].Cost+u.Cost <= schemas.MaxCount {
		have := &p.usage[i]
		have.Allowed += u.Allowed
		have.Rejected += u.Rejected
		have.Cost += u.Cost
		if u.Time.Before(have.Time) {
			have.Time = u.Time
		}
		return
	}
	p.usageAt[k] = len(p.usage)
	p.usage = append(p.usage, u)
}

func (p *pending) addTokens(t schemas.Tokens) {
	t.Rule, t.Layer, t.Key, t.Tenant = text(t.Rule), text(t.Layer), text(t.Key), text(t.Tenant)
	t.Window = max(t.Window, 0)
	k := bucketKey{t.Rule, t.Key, t.Incarnation}
	i, ok := p.tokensAt[k]
	if !ok {
		p.tokensAt[k] = len(p.tokens)
		p.tokens = append(p.tokens, t)
		return
	}
	have := p.tokens[i]
	t.Taken = min(t.Taken+have.Taken, schemas.MaxCount)
	t.Refused = min(t.Refused+have.Refused, schemas.MaxCount)
	t.Cum = max(t.Cum, have.Cum)
	t.TokensMin = min(t.TokensMin, have.TokensMin)
	t.Window += have.Window
	p.tokens[i] = t
}

// addRejections keeps at most max samples.
func (p *pending) addRejections(all []schemas.Rejection, max int) (kept, dropped int) {
	for i := range all {
		if len(p.rejections) >= max {
			return i, len(all) - i
		}
		j := all[i]
		for _, s := range []*string{&j.Tenant, &j.Route, &j.Rule, &j.Layer, &j.Method, &j.Path, &j.Client, &j.Instance} {
			*s = text(*s)
		}
		p.rejections = append(p.rejections, j)
	}
	return len(all), 0
}

// cut is how many entries of each kind a report takes.
type cut struct{ usage, tokens, rejections int }

// Upper bounds of an encoded entry without its texts: at most 11 bytes for each number and 4 for each text.
const (
	usageBytes     = 4*11 + 4*4 + 8
	tokensBytes    = 11*11 + 5*4 + 8
	rejectionBytes = 2*11 + 8*4 + 8
	reportBytes    = 256
)

// cut returns a report of at most maxEntries entries and maxBytes encoded bytes: buckets first, for throttling waits
// for them. It takes from the ends; the entries stay until remove is called.
func (p *pending) cut(maxEntries, maxBytes int) (*schemas.Report, cut) {
	var c cut
	size, left := reportBytes, maxEntries
	fits := func(n int) bool {
		if left == 0 || (left < maxEntries && size+n > maxBytes) {
			return false
		}
		size += n
		left--
		return true
	}
	for c.tokens < len(p.tokens) {
		t := &p.tokens[len(p.tokens)-1-c.tokens]
		if !fits(tokensBytes + len(t.Rule) + len(t.Layer) + len(t.Key) + len(t.Tenant) + len(t.Mode)) {
			break
		}
		c.tokens++
	}
	for c.usage < len(p.usage) {
		u := &p.usage[len(p.usage)-1-c.usage]
		if !fits(usageBytes + len(u.Tenant) + len(u.Route) + len(u.Rule) + len(u.Layer)) {
			break
		}
		c.usage++
	}
	for c.rejections < len(p.rejections) {
		j := &p.rejections[len(p.rejections)-1-c.rejections]
		if !fits(rejectionBytes + len(j.Tenant) + len(j.Route) + len(j.Rule) + len(j.Layer) + len(j.Method) + len(j.Path) + len(j.Client) + len(j.Instance)) {
			break
		}
		c.rejections++
	}
	return &schemas.Report{
		Usage:      tail(p.usage, c.usage),
		Tokens:     tail(p.tokens, c.tokens),
		Rejections: tail(p.rejections, c.rejections),
	}, c
}

// tail is a copy of the last n.
func tail[T any](s []T, n int) []T {
	if n == 0 {
		return nil
	}
	return append(make([]T, 0, n), s[len(s)-n:]...)
}

// remove takes out what cut returned.
func (p *pending) remove(c cut) {
	for i := len(p.usage) - c.usage; i < len(p.usage); i++ {
		u := &p.usage[i]
		p.requests -= u.Allowed + u.Rejected
		if k := hourOf(u); p.usageAt[k] == i {
			delete(p.usageAt, k)
		}
	}
	for i := len(p.tokens) - c.tokens; i < len(p.tokens); i++ {
		t := &p.tokens[i]
		delete(p.tokensAt, bucketKey{t.Rule, t.Key, t.Incarnation})
	}
	p.usage = shrink(p.usage, c.usage)
	p.tokens = shrink(p.tokens, c.tokens)
	p.rejections = shrink(p.rejections, c.rejections)
	if p.len() == 0 && cap(p.usage)+cap(p.tokens) > 4096 { // an outage has passed: let go of its memory
		*p = newPending()
	}
}

func shrink[T any](s []T, n int) []T {
	clear(s[len(s)-n:])
	return s[:len(s)-n]
}

// text is s as a report may carry it: valid UTF-8 of at most schemas.MaxTextBytes.
func text(s string) string {
	if len(s) <= schemas.MaxTextBytes && utf8.ValidString(s) {
		return s
	}
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) > schemas.MaxTextBytes {
		n := schemas.MaxTextBytes
		for !utf8.RuneStart(s[n]) {
			n--
		}
		s = strings.Clone(s[:n])
	}
	return s
}
