package alerting

import (
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/weirhq/weir/schemas"
)

// idleAfter is how long after a bucket's last record its level is worked out from its rate. A bucket in use is reported
// more often; before that, what it was is closer to the truth than what it could have become.
const idleAfter = 5 * time.Second

type bucketKey struct{ rule, key string }

// bucket is one that is low somewhere, or was a moment ago. Only these are kept.
type bucket struct {
	bucketKey
	tenant string
	layer  string
	parts  []part // of the gateways that reported it
	// mute is set while nothing was reported since the alert was learned from the stream: then there is no level to judge.
	mute    bool
	unheard time.Duration
	watch   watch
}

// part is a bucket on one gateway.
type part struct {
	gateway   *gateway
	last      int64 // tokens
	capacity  int64
	rateNanos int64
	at        time.Time // of last
}

// level is the tokens of p at now, in 0 to its capacity when nothing was taken since.
func (p *part) level(now time.Time) float64 {
	level := float64(p.last)
	if idle := now.Sub(p.at); idle > idleAfter {
		level = math.Min(float64(p.capacity), level+float64(p.rateNanos)/1e9*idle.Seconds())
	}
	return level
}

// bucket returns the bucket of k, made when missing for an alert that was learned.
func (d *Detector) bucket(k bucketKey, a *schemas.Alert) *bucket {
	b := d.buckets[k]
	if b == nil {
		b = &bucket{bucketKey: k, tenant: a.Tenant, mute: true}
		d.buckets[k] = b
	}
	return b
}

func (d *Detector) observeTokens(t *schemas.Tokens, g *gateway, at time.Time) {
	// A shadow rule refuses nobody: its curve is in the history, and nobody is woken.
	if t.Mode == "shadow" || (t.Layer != "guard" && t.Layer != "contract" && t.Layer != "route") {
		return
	}
	k := bucketKey{t.Rule, t.Key}
	b := d.buckets[k]
	// A key that is denied on purpose is always empty, and one without a limit never is.
	if t.LimitBurst == 0 || t.LimitRateNanos <= 0 || t.RateNanos < 0 {
		if b != nil {
			b.mute = false
			b.drop(g)
		}
		return
	}
	if b == nil {
		if float64(t.TokensLast) >= d.cfg.LowTokensClear*float64(t.Capacity) {
			return // well, as nearly all are
		}
		if len(d.buckets) >= d.cfg.MaxBuckets {
			d.m.Dropped.WithLabelValues(droppedBucket).Inc()
			return
		}
		k = bucketKey{strings.Clone(t.Rule), strings.Clone(t.Key)}
		b = &bucket{bucketKey: k, tenant: strings.Clone(t.Tenant)}
		d.buckets[k] = b
	}
	b.mute, b.layer = false, layerOf(t.Layer)
	b.set(part{gateway: g, last: t.TokensLast, capacity: t.Capacity, rateNanos: t.RateNanos, at: at})
}

// layerOf returns a layer's name without holding on to the report it came in.
func layerOf(layer string) string {
	if layer == "guard" {
		return "guard"
	}
	return "other"
}

func (b *bucket) set(p part) {
	for i := range b.parts {
		if b.parts[i].gateway == p.gateway {
			b.parts[i] = p
			return
		}
	}
	b.parts = append(b.parts, p)
}

func (b *bucket) drop(g *gateway) {
	for i := range b.parts {
		if b.parts[i].gateway == g {
			b.parts[i] = b.parts[len(b.parts)-1]
			b.parts = b.parts[:len(b.parts)-1]
			return
		}
	}
}

// ratio is how full b is over the gateways that are heard. It is not known while none of those that reported it is. Where
// no gateway holds a part any more the bucket is full: a full bucket is the same as none.
func (b *bucket) ratio(cfg *Config, reporting bool, now time.Time) (ratio float64, known bool) {
	var level, capacity float64
	for i := range b.parts {
		if p := &b.parts[i]; p.gateway.reporting(cfg) {
			level += p.level(now)
			capacity += float64(p.capacity)
		}
	}
	switch {
	case capacity > 0:
		return level / capacity, true
	case len(b.parts) == 0 && reporting && !b.mute:
		return 1, true
	}
	return 0, false
}

func (d *Detector) judgeBucket(b *bucket, reporting bool, now time.Time, dt time.Duration) {
	ratio, known := b.ratio(&d.cfg, reporting, now)
	v := between
	switch {
	case !known:
		v = unknown
	case ratio < d.cfg.LowTokens:
		v = bad
	case ratio > d.cfg.LowTokensClear:
		v = good
	}
	switch b.watch.step(v, dt, d.cfg.LowTokensFor) {
	case begins:
		a := schemas.Alert{Name: LowTokens, Severity: schemas.SeverityWarning, Tenant: b.tenant, Rule: b.rule, Key: b.key,
			Value: ratio, Threshold: d.cfg.LowTokens, Summary: fmt.Sprintf("%s has %s of its tokens left", b, percent(ratio))}
		if b.layer == "guard" {
			a.Severity = schemas.SeverityCritical
		}
		d.begin(&b.watch, a)
	case ends:
		d.resolve(&b.watch, ratio, "%s has %s of its tokens again", b, percent(ratio))
	}
	if v != unknown {
		b.unheard = 0
	} else if b.unheard += dt; b.unheard >= d.cfg.Forget && reporting && b.watch.firing != nil {
		d.resolve(&b.watch, b.watch.firing.Value, "nothing was heard of %s for %s", b, d.cfg.Forget)
	}
	if b.watch.idle() && (v == good || v == unknown && b.unheard >= d.cfg.Silent) {
		delete(d.buckets, b.bucketKey)
	}
}

// String names the bucket for people.
func (b *bucket) String() string {
	switch {
	case b.key == "":
		return "rule " + b.rule
	case b.tenant != "" && b.tenant != b.key:
		return fmt.Sprintf("%s of tenant %s under rule %s", b.key, b.tenant, b.rule)
	default:
		return b.key + " under rule " + b.rule
	}
}

func percent(ratio float64) string { return fmt.Sprintf("%.3g %%", 100*ratio) }
