package ingest

import (
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/weirhq/weir/schemas"
)

// pending is what is gathered and not yet sealed: normally for a moment. While nothing can be sealed, requests and tokens stay where
// they are counted, and add up there.
type pending struct {
	usage      []schemas.Usage
	usageAt    map[hourKey]int
	tokens     []schemas.Tokens
	rejections []schemas.Rejection
	generation uint32 // the last one in usage; 0 when there is none
}

type hourKey struct {
	usageKey
	hour int64 // since 1970
}

func newPending() pending {
	return pending{usageAt: map[hourKey]int{}}
}

func (p *pending) len() int { return len(p.usage) + len(p.tokens) + len(p.rejections) }

const hour = int64(time.Hour)

// hourAt is the hour of a time, both since 1970.
func hourAt(ns int64) int64 {
	h := ns / hour
	if ns%hour < 0 {
		h--
	}
	return h
}

// maxParts bounds the reports that one count is divided among. No process counts more in an hour: what is more is damaged.
const maxParts = 10_000

// Usage is what a cell counted, which may be as much as maxParts reports can say.
func (c *Cell) Usage(tenant, route, rule, layer string) schemas.Usage {
	n, cost, first := c.Read()
	n = min(n, maxParts*schemas.MaxReportRequests)
	u := schemas.Usage{Time: time.Unix(0, first).UTC(), Tenant: text(tenant), Route: text(route), Rule: text(rule), Layer: text(layer),
		Cost: min(cost, min(n, maxParts)*schemas.MaxReportCost)}
	if u.Rule == "" {
		u.Layer, u.Allowed = "", n
	} else {
		u.Rejected = n
	}
	return u
}

// addUsage adds a cell, in as many parts as reports can say it in. A key may have a cell in several shards.
func (p *pending) addUsage(c *cell) {
	u := c.at.Usage(c.key.tenant, c.key.route, c.key.rule, c.key.layer)
	n := &u.Allowed
	if u.Rule != "" {
		n = &u.Rejected
	}
	requests, cost := *n, u.Cost
	for parts := max(1, (requests+schemas.MaxReportRequests-1)/schemas.MaxReportRequests, (cost+schemas.MaxReportCost-1)/schemas.MaxReportCost); parts > 0; parts-- {
		*n, u.Cost = requests/parts, cost/parts
		requests, cost = requests-*n, cost-u.Cost
		p.add(u)
	}
}

func (p *pending) add(u schemas.Usage) {
	k := hourKey{usageKey{u.Tenant, u.Route, u.Rule, u.Layer}, hourAt(u.Time.UnixNano())}
	i, ok := p.usageAt[k]
	// An entry that would leave the bounds of a report goes beside the first; only the newer one grows.
	if ok && p.usage[i].Allowed+u.Allowed <= schemas.MaxReportRequests && p.usage[i].Rejected+u.Rejected <= schemas.MaxReportRequests && p.usage[i].Cost+u.Cost <= schemas.MaxReportCost {
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
	p.tokens = append(p.tokens, t)
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

// cut is a place in pending: so many entries of each kind are before it.
type cut struct{ usage, tokens, rejections int }

// Upper bounds of an encoded entry without its texts: at most 11 bytes for each number and 4 for each text.
const (
	usageBytes     = 4*11 + 4*4 + 8
	tokensBytes    = 12*11 + 6*4 + 16
	rejectionBytes = 2*11 + 8*4 + 8
	reportBytes    = 256
)

// cut returns a report of at most maxEntries entries and maxBytes encoded bytes, within the bounds of what one adds up to, with what follows
// from, buckets first, for throttling waits for them, and where it ends. It returns nil when nothing follows.
func (p *pending) cut(from cut, maxEntries, maxBytes int) (*schemas.Report, cut) {
	to := from
	size, left := reportBytes, maxEntries
	fits := func(n int) bool {
		if left == 0 || (left < maxEntries && size+n > maxBytes) {
			return false
		}
		size += n
		left--
		return true
	}
	for to.tokens < len(p.tokens) {
		t := &p.tokens[to.tokens]
		if !fits(tokensBytes + len(t.Rule) + len(t.Layer) + len(t.Key) + len(t.Tenant) + len(t.Mode)) {
			break
		}
		to.tokens++
	}
	var requests, cost uint64
	for to.usage < len(p.usage) {
		u := &p.usage[to.usage]
		requests, cost = requests+u.Allowed+u.Rejected, cost+u.Cost
		if requests > schemas.MaxReportRequests || cost > schemas.MaxReportCost || !fits(usageBytes+len(u.Tenant)+len(u.Route)+len(u.Rule)+len(u.Layer)) {
			break
		}
		to.usage++
	}
	for to.rejections < len(p.rejections) {
		j := &p.rejections[to.rejections]
		if !fits(rejectionBytes + len(j.Tenant) + len(j.Route) + len(j.Rule) + len(j.Layer) + len(j.Method) + len(j.Path) + len(j.Client) + len(j.Instance)) {
			break
		}
		to.rejections++
	}
	if to == from {
		return nil, from
	}
	return &schemas.Report{
		Usage:      slices.Clone(p.usage[from.usage:to.usage]),
		Tokens:     slices.Clone(p.tokens[from.tokens:to.tokens]),
		Rejections: slices.Clone(p.rejections[from.rejections:to.rejections]),
	}, to
}

// clear forgets all.
func (p *pending) clear() {
	if p.len()*8 < cap(p.usage)+cap(p.tokens) && cap(p.usage)+cap(p.tokens) > 4096 { // a peak has passed: let go of its memory
		*p = newPending()
		return
	}
	clear(p.usageAt)
	clear(p.usage)
	clear(p.tokens)
	clear(p.rejections)
	p.usage, p.tokens, p.rejections, p.generation = p.usage[:0], p.tokens[:0], p.rejections[:0], 0
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
