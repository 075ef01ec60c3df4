package enforcer

import (
	"context"
	"time"

	"github.com/weirhq/weir/enforcer/bucket"
	"github.com/weirhq/weir/schemas"
)

// Taker asks the centre for tokens of a key whose limit is kept strictly. A cost below 0 gives tokens back. It returns within a few
// milliseconds, with an error when there was no answer.
type Taker func(ctx context.Context, q schemas.TakeRequest) (schemas.TakeReply, error)

// Asks says whether the decision is not made yet: rules that are kept strictly admit nothing before the centre was asked, by Settle.
// It is only so with Config.Ask.
func (d *Decision) Asks() bool { return d.asks != 0 }

// FellBack says whether this gateway's part of the limit decided for a rule that is kept strictly: the centre gave no answer in time,
// or was not asked because it is silent or without its store.
func (d *Decision) FellBack() bool { return d.fell }

// Settle makes a decision that Check left open, by asking the centre for each rule that is kept strictly. Where it does not answer,
// this gateway's part of the limit decides. What other rules gave to a request that is refused in the end is put back.
func (e *Enforcer) Settle(ctx context.Context, now int64, q *Request, d Decision, take Taker) Decision {
	v := d.view
	var taken uint64 // by the centre
	for i, r := range v.checks {
		bit := uint64(1) << i
		if d.asks&bit == 0 {
			continue
		}
		d.asks &^= bit
		ask, idx := e.ask(v, r, q)
		whole := &v.entry(idx).whole
		reply, err := take(ctx, ask)
		switch {
		case err != nil:
			d.fell = d.fell || ctx.Err() == nil // else nobody waits for the answer any more
			if !e.takeHere(v, r, q, now, &d) {
				e.unsettle(ctx, v, i, taken, q, now, &d, take)
				return d
			}
		case !reply.Allowed:
			e.follow(v, r, q, now, whole, 0, reply.Remaining)
			b := bucket.Decision{Remaining: reply.Remaining, RetryIn: reply.RetryIn}
			d.note(r, r.mark(idx), &b, q.Cost, whole)
			e.unsettle(ctx, v, i, taken, q, now, &d, take)
			return d
		default:
			taken |= bit
			d.stand(r.mark(idx), reply.Remaining, whole.Burst)
			e.follow(v, r, q, now, whole, q.Cost, reply.Remaining)
		}
	}
	return d
}

// ask is what the centre is asked for r, and the entry of its limit.
func (e *Enforcer) ask(v *view, r *rule, q *Request) (schemas.TakeRequest, uint32) {
	idx := v.entryFor(r, q.Tenant)
	whole := &v.entry(idx).whole
	var buf [MaxKeyBytes + 64]byte
	return schemas.TakeRequest{Rule: r.src.Name, Key: string(appendKey(buf[:0], r.dims, q)), LimitRateNanos: whole.Rate.Nano(), LimitBurst: whole.Burst, Cost: q.Cost}, idx
}

// takeHere asks this gateway's bucket.
func (e *Enforcer) takeHere(v *view, r *rule, q *Request, now int64, d *Decision) bool {
	a := asking{q: q, d: d, now: now}
	if r.pool != nil {
		return e.takePool(&a, r)
	}
	return e.take(v, &a, r)
}

// inHand: a gateway keeps what its part of the limit earns in this time for requests whose answer comes late.
const inHand = 100 * time.Millisecond

// follow takes from this gateway's bucket what the centre has given, as far as it goes, and leaves no more in it than its part of what the
// centre has left, or what it earns in inHand: when the centre falls silent, no fuller bucket must be waiting here. It counts as no use,
// for the centre has counted it.
func (e *Enforcer) follow(v *view, r *rule, q *Request, now int64, whole *bucket.Limit, given, left int64) {
	follows := func(tokens int64, here bucket.Limit) int64 {
		part := left
		if here.Burst < whole.Burst {
			part = int64(float64(left) * (float64(here.Burst) / float64(whole.Burst)))
		}
		return max(min(tokens-given, max(part, here.Rate.Nano()/int64(time.Second/inHand)/1e9)), 0)
	}
	if r.pool != nil {
		p := r.pool
		p.mu.Lock()
		defer p.mu.Unlock()
		p.refill(e, now)
		p.state.Tokens = follows(p.state.Tokens, p.limit)
		p.level.Store(p.state.Tokens + p.credits())
		return
	}
	h, h2 := e.hash(r, q)
	sh := &e.shards[h%shardN]
	s, w := e.lock(v, &asking{q: q, now: now}, r, h, h2)
	if s == nil {
		return
	}
	lim, _ := e.limit(v, sh, s, r, q.Tenant, now)
	b := s.state().Level(*lim, now)
	b.Tokens = follows(b.Tokens, *lim)
	s.set(b)
	s.unlock(w)
}

// unsettle puts back what rules gave to a request that v.checks[refused] refuses: those before it, and those after it that Check asked.
func (e *Enforcer) unsettle(ctx context.Context, v *view, refused int, taken uint64, q *Request, now int64, d *Decision, take Taker) {
	for i, r := range v.checks {
		bit := uint64(1) << i
		switch {
		case i == refused || d.asks&bit != 0: // it gave nothing
		case taken&bit != 0:
			back, _ := e.ask(v, r, q)
			back.Cost = -back.Cost
			_, _ = take(ctx, back) // unanswered, it may be lost to the limit
		default:
			e.putBackTo(v, &asking{q: q, d: d, now: now}, r)
		}
	}
	d.asks = 0
	d.Remaining = max(d.Remaining, 0)
}

// open says whether the centre can be asked for the rule's tokens. Decision.asks has room for 64 rules.
func (r *rule) open(e *Enforcer, now int64) bool { return r.nth < 64 && now <= e.storeUntil.Load() }
