package enforcer_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/weirhq/weir/enforcer"
	"github.com/weirhq/weir/enforcer/bucket"
	"github.com/weirhq/weir/limits"
	"github.com/weirhq/weir/schemas"
)

// strictPolicy has a local rule of 5, a strict one of 10 and a local one per route of 3, all without a refill to speak of.
func strictPolicy(t *testing.T) *limits.Policy {
	t.Helper()
	rate, err := bucket.NewRate(1, 1, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	rule := func(name string, layer limits.Layer, c limits.Consistency, burst int64, key ...limits.Dimension) limits.Rule {
		return limits.Rule{Name: name, Layer: layer, Key: key, Consistency: c, Fixed: bucket.Limit{Rate: rate, Burst: burst}}
	}
	tenant := limits.Dimension{Kind: limits.ByTenant}
	return &limits.Policy{Version: 1, Rules: []limits.Rule{
		rule("first", limits.LayerContract, limits.Local, 5, tenant),
		rule("all", limits.LayerContract, limits.Strict, 10, tenant),
		rule("last", limits.LayerRoute, limits.Local, 3, tenant, limits.Dimension{Kind: limits.ByRoute}),
	}}
}

func TestStrictAsksTheCentreLastAndPutsBackWhatItRefuses(t *testing.T) {
	var now int64
	e := enforcer.New(enforcer.Config{Stripes: 1, Fleet: 2, Ask: true, Clock: func() int64 { return now }})
	e.SetPolicy(strictPolicy(t))
	e.Apply(enforcer.Update{Gateways: 2, TTL: time.Minute})
	left, asked := int64(2), 0
	take := func(_ context.Context, q schemas.TakeRequest) (schemas.TakeReply, error) {
		asked++
		if q.Rule != "all" || q.Key != "a" || q.LimitBurst != 10 {
			t.Errorf("asked for %+v", q)
		}
		if left < q.Cost {
			return schemas.TakeReply{Remaining: left, RetryIn: time.Second}, nil
		}
		left -= q.Cost
		return schemas.TakeReply{Allowed: true, Remaining: left}, nil
	}
	ask := func(route string) enforcer.Decision {
		q := enforcer.Request{Tenant: "a", Route: route, Cost: 1}
		d := e.Check(now, &q)
		if d.Asks() {
			d = e.Settle(context.Background(), now, &q, d, take)
		}
		return d
	}
	for range 2 {
		if d := ask("r"); !d.Allowed || d.Asks() {
			t.Fatalf("with tokens at the centre: %+v", d)
		}
	}
	for range 20 { // each takes nothing from the local rules, or they would soon refuse
		if d := ask("r"); d.Allowed || d.Rule != "all" || d.Reason != enforcer.ReasonLimit || d.RetryIn != time.Second {
			t.Fatalf("without: %+v, want a refusal by all", d)
		}
	}
	left = 100
	if d := ask("r"); !d.Allowed {
		t.Fatalf("again with tokens: %+v", d)
	}
	asked = 0
	if d := ask("r"); d.Allowed || d.Rule != "last" || asked != 0 {
		t.Errorf("refused by a local rule: %+v after %d questions, want last and none", d, asked)
	}
	for range 2 {
		if d := ask("s"); !d.Allowed {
			t.Errorf("on another route: %+v", d)
		}
	}
	if d := ask("t"); d.Allowed || d.Rule != "first" {
		t.Errorf("the sixth: %+v, want a refusal by first", d)
	}
	if left != 97 {
		t.Errorf("%d left at the centre, want 97: three were admitted", left)
	}
}

// TestStrictLeavesNothingInHand: a gateway whose centre falls silent goes on from what the centre had left, not from a bucket that has
// filled up here meanwhile, whether the centre gave or refused last.
func TestStrictLeavesNothingInHand(t *testing.T) {
	for _, c := range []struct {
		name  string
		reply schemas.TakeReply
		want  int // of half of ten
	}{
		{"all that there was was given", schemas.TakeReply{Allowed: true}, 0},
		{"nothing was left", schemas.TakeReply{RetryIn: time.Second}, 0},
		{"half was left", schemas.TakeReply{Allowed: true, Remaining: 5}, 2},
		{"nearly all was left", schemas.TakeReply{Allowed: true, Remaining: 9}, 4},
	} {
		for _, key := range [][]limits.Dimension{{{Kind: limits.ByTenant}}, nil} { // and a pool
			var now int64
			p := strictPolicy(t)
			p.Rules = p.Rules[1:2]
			p.Rules[0].Key = key
			e := enforcer.New(enforcer.Config{Stripes: 1, Fleet: 2, Ask: true, Clock: func() int64 { return now }})
			e.SetPolicy(p)
			e.Apply(enforcer.Update{Gateways: 2, TTL: time.Minute})
			silent := false
			admitted := 0
			for range 20 {
				q := enforcer.Request{Tenant: "a", Cost: 1}
				d := e.Settle(t.Context(), now, &q, e.Check(now, &q), func(context.Context, schemas.TakeRequest) (schemas.TakeReply, error) {
					if silent {
						return schemas.TakeReply{}, errors.New("no answer")
					}
					return c.reply, nil
				})
				if silent && d.Allowed {
					admitted++
				}
				silent = true
			}
			if admitted != c.want {
				t.Errorf("%s, key %v: %d admitted without an answer, want %d", c.name, key, admitted, c.want)
			}
		}
	}
}

// TestLocalThenSharedIsAnother: what a rule's buckets gave while it was local is not told as used of the shared limit.
func TestLocalThenSharedIsAnother(t *testing.T) {
	var now int64
	p := strictPolicy(t)
	p.Rules = p.Rules[1:2]
	e := enforcer.New(enforcer.Config{Stripes: 1, Fleet: 2, Clock: func() int64 { return now }})
	under := func(c limits.Consistency) {
		next := *p
		next.Rules = slices.Clone(p.Rules)
		next.Rules[0].Consistency = c
		e.SetPolicy(&next)
	}
	ask := func(n int) {
		for range n {
			q := enforcer.Request{Tenant: "a", Cost: 1}
			e.Check(now, &q)
		}
	}
	taken := func() map[string]uint64 {
		sum := map[string]uint64{}
		e.Collect(now, true, func(b enforcer.Bucket) { sum[b.Consistency] += b.Taken })
		return sum
	}
	under(limits.Local)
	e.Apply(enforcer.Update{Gateways: 2, TTL: time.Minute})
	ask(7)
	under(limits.Shared)
	ask(2)
	if got := taken(); got["local"] != 7 || got[""] != 2 || len(got) != 2 {
		t.Errorf("taken by consistency: %v, want 7 local and 2 shared", got)
	}
	under(limits.Local)
	ask(1)
	under(limits.Shared)
	ask(1)
	var cum uint64
	e.Collect(now, true, func(b enforcer.Bucket) {
		if b.Consistency != "local" {
			cum += b.Cum
		}
	})
	if cum != 3 {
		t.Errorf("%d given of the shared limit in all, want 3", cum)
	}
}

func TestStrictWithoutAnAnswerIsThePartOfThisGateway(t *testing.T) {
	var now int64
	p := strictPolicy(t)
	p.Rules = p.Rules[1:2]
	e := enforcer.New(enforcer.Config{Stripes: 1, Fleet: 2, Ask: true, Clock: func() int64 { return now }})
	e.SetPolicy(p)
	e.Apply(enforcer.Update{Gateways: 2, TTL: time.Minute})
	answers := 0
	take := func(context.Context, schemas.TakeRequest) (schemas.TakeReply, error) {
		if answers++; answers <= 3 {
			return schemas.TakeReply{Allowed: true, Remaining: int64(10 - answers)}, nil
		}
		return schemas.TakeReply{}, errors.New("no answer")
	}
	admitted := 0
	for range 20 {
		q := enforcer.Request{Tenant: "a", Cost: 1}
		if d := e.Settle(context.Background(), now, &q, e.Check(now, &q), take); d.Allowed {
			admitted++
		}
	}
	if admitted != 5 { // half of ten, of which the centre gave three
		t.Errorf("%d admitted, want 5", admitted)
	}
	var cum uint64
	e.Collect(now, true, func(b enforcer.Bucket) { cum += b.Cum })
	if cum != 2 {
		t.Errorf("%d reported as taken here, want the 2 that the centre does not know of", cum)
	}
	// silent for longer: nobody is asked
	now += int64(2 * time.Minute)
	q := enforcer.Request{Tenant: "b", Cost: 1}
	if d := e.Check(now, &q); d.Asks() || !d.Allowed {
		t.Errorf("isolated: %+v, want admitted by this gateway's part, without asking", d)
	}
}

func TestOnStoreLoss(t *testing.T) {
	for loss, want := range map[limits.StoreLoss]string{limits.LossLocal: "5", limits.LossDeny: "0 store-loss", limits.LossAllow: "20"} {
		var now int64
		p := strictPolicy(t)
		p.Rules = p.Rules[1:2]
		p.Rules[0].Consistency, p.Rules[0].OnStoreLoss = limits.Shared, loss
		e := enforcer.New(enforcer.Config{Stripes: 1, Fleet: 2, Clock: func() int64 { return now }})
		e.SetPolicy(p)
		e.Apply(enforcer.Update{Gateways: 2, TTL: time.Second})
		now += int64(time.Minute)
		admitted, reason := 0, ""
		for range 20 {
			d := e.Check(now, &enforcer.Request{Tenant: "a", Cost: 1})
			if d.Allowed {
				admitted++
			} else if d.Reason == enforcer.ReasonStoreLoss {
				reason = " " + d.Reason.String()
			}
		}
		if got := string(rune('0'+admitted/10)) + string(rune('0'+admitted%10)) + reason; got != want && got != "0"+want {
			t.Errorf("on_store_loss %v: %s admitted, want %s", loss, got, want)
		}
	}
}

// TestOnStoreLossActsWhereTheCentreHasNoStore: a centre without Redis goes on speaking, and what it says keeps shares up, but it is no
// store.
func TestOnStoreLossActsWhereTheCentreHasNoStore(t *testing.T) {
	const ms = int64(time.Millisecond)
	for loss, want := range map[limits.StoreLoss][2]string{
		limits.LossLocal: {"5 admitted, limit", "5 admitted, limit"}, limits.LossDeny: {"5 admitted, limit", "0 admitted, store-loss"}, limits.LossAllow: {"5 admitted, limit", "20 admitted"},
	} {
		var now int64
		p := strictPolicy(t)
		p.Rules = p.Rules[1:2]
		p.Rules[0].Consistency, p.Rules[0].OnStoreLoss = limits.Shared, loss
		e := enforcer.New(enforcer.Config{Stripes: 1, StaleAfter: 750 * time.Millisecond, Clock: func() int64 { return now }})
		e.SetPolicy(p)
		ask := func(tenant, want string) {
			t.Helper()
			admitted, reason := 0, ""
			for range 20 {
				if d := e.Check(now, &enforcer.Request{Tenant: tenant, Cost: 1}); d.Allowed {
					admitted++
				} else {
					reason = ", " + d.Reason.String()
				}
			}
			if got := fmt.Sprint(admitted, " admitted", reason); got != want {
				t.Errorf("on_store_loss %v, tenant %s after %d ms: %s, want %s", loss, tenant, now/ms, got, want)
			}
		}
		mode := func(want string) {
			t.Helper()
			if got := e.Mode(); got != want {
				t.Errorf("on_store_loss %v after %d ms: mode %s, want %s", loss, now/ms, got, want)
			}
		}
		say := func(frozen bool) {
			e.Apply(enforcer.Update{Gateways: 2, TTL: 3 * time.Second, Frozen: frozen})
		}
		say(false)
		for ; now <= 20_000*ms; now += 250 * ms {
			switch say(now > 0); now / ms {
			case 750:
				mode(enforcer.Synced)
			case 1000:
				mode(enforcer.Stale)
			case 3000:
				ask("a", want[0])
			case 3250:
				ask("b", want[1])
			case 20_000:
				ask("c", want[1])
				mode(enforcer.Stale)
			}
		}
		say(false)
		ask("d", want[0])
		mode(enforcer.Synced)
	}
}

// TestWhatWasNotTakenIsNotPutBack: whether the store was lost is asked once for each request, which may be long.
func TestWhatWasNotTakenIsNotPutBack(t *testing.T) {
	var now int64
	p := strictPolicy(t)
	one := p.Rules[2]
	one.Name, one.Key, one.Fixed.Burst = "one", []limits.Dimension{{Kind: limits.ByHeader, Header: "X-One"}}, 1
	p.Rules = []limits.Rule{p.Rules[0], p.Rules[1], one}
	p.Rules[0].Consistency, p.Rules[0].OnStoreLoss = limits.Shared, limits.LossAllow
	e := enforcer.New(enforcer.Config{Stripes: 1, Ask: true, Clock: func() int64 { return now }})
	e.SetPolicy(p)
	found := func() { e.Apply(enforcer.Update{Gateways: 1, TTL: time.Minute}) }
	left := func(step string, want int64) {
		t.Helper()
		d := e.Check(now, &enforcer.Request{Tenant: "a"})
		if got := d.Standing(0); got.Rule.Name != "first" || got.Remaining != want {
			t.Errorf("%s: %d left of %s, want %d of first", step, got.Remaining, got.Rule.Name, want)
		}
	}
	answer := schemas.TakeReply{Allowed: true, Remaining: 10}
	take := func(context.Context, schemas.TakeRequest) (schemas.TakeReply, error) {
		now += int64(2 * time.Minute) // more than shares hold
		return answer, nil
	}
	request := func(one string, during func()) enforcer.Decision {
		q := enforcer.Request{Tenant: "a", Cost: 1, Header: func(string) string { during(); return one }}
		d := e.Check(now, &q)
		if d.Asks() {
			d = e.Settle(t.Context(), now, &q, d, take)
		}
		return d
	}
	found()
	request("x", func() {})
	found()
	request("y", func() {})
	now += int64(2 * time.Minute)
	found()
	left("two were admitted", 3)

	now += int64(2 * time.Minute)
	if d := request("x", found); d.Allowed || d.Rule != "one" {
		t.Fatalf("%+v, want a refusal by one", d)
	}
	left("the store came back while one was asked", 3)

	answer.Allowed = false
	if d := request("z", func() {}); d.Allowed || d.Rule != "all" {
		t.Fatalf("%+v, want a refusal by all", d)
	}
	found()
	left("the store was lost while all was asked", 3)
}

func TestStrictSaysThatItFellBack(t *testing.T) {
	var now int64
	e := enforcer.New(enforcer.Config{Stripes: 1, Ask: true, Clock: func() int64 { return now }})
	e.SetPolicy(strictPolicy(t))
	say := func(frozen bool) { e.Apply(enforcer.Update{Gateways: 1, TTL: time.Minute, Frozen: frozen}) }
	say(false)
	gone, leave := context.WithCancel(t.Context())
	leave()
	for _, step := range []struct {
		what string
		ctx  context.Context
		err  error
		wait time.Duration
		want bool
	}{
		{"an answer", t.Context(), nil, 0, false},
		{"none", t.Context(), context.DeadlineExceeded, 0, true},
		{"none, and nobody waits for it", gone, context.Canceled, 0, false},
		{"a centre that has been without its store", t.Context(), nil, 2 * time.Minute, true},
	} {
		now += int64(step.wait)
		say(step.wait > 0)
		q := enforcer.Request{Tenant: step.what, Cost: 1}
		d := e.Check(now, &q)
		if asks := step.wait == 0; d.Asks() != asks {
			t.Errorf("%s: the centre is to be asked: %v, want %v", step.what, d.Asks(), asks)
		}
		if d.Asks() {
			d = e.Settle(step.ctx, now, &q, d, func(context.Context, schemas.TakeRequest) (schemas.TakeReply, error) {
				return schemas.TakeReply{Allowed: true}, step.err
			})
		}
		if !d.Allowed || d.FellBack() != step.want {
			t.Errorf("%s: allowed %v, fell back %v, want true, %v", step.what, d.Allowed, d.FellBack(), step.want)
		}
	}
}

// TestGrants: a grant is taken once, whatever becomes of the message, and only by the bucket that it was meant for.
func TestGrants(t *testing.T) {
	var now int64
	p := strictPolicy(t)
	p.Rules = p.Rules[1:2]
	p.Rules[0].Consistency = limits.Lease
	e := enforcer.New(enforcer.Config{Stripes: 1, Fleet: 2, Clock: func() int64 { return now }})
	e.SetPolicy(p)
	rate := p.Rules[0].Fixed.Rate.Nano()
	say := func(epoch, version uint64, burst int64, granted, grant uint64) {
		e.Apply(enforcer.Update{Gateways: 2, TTL: time.Hour, Epoch: epoch, Shares: []schemas.Share{
			{Rule: "all", Key: "a", Version: version, Burst: burst, LimitRateNanos: rate, LimitBurst: 10, Granted: granted, Grant: grant}}})
	}
	left := func() int64 {
		return e.Check(now, &enforcer.Request{Tenant: "a"}).Remaining
	}
	for _, step := range []struct {
		what           string
		epoch, version uint64
		burst          int64
		granted, grant uint64
		want           int64
	}{
		{"the share cuts what does not fit", 1, 1, 3, 0, 0, 3},
		{"a grant that fits in part", 1, 2, 4, 0, 6, 4},
		{"again", 1, 2, 4, 0, 6, 4},
		{"again in a newer message", 1, 3, 9, 0, 6, 4},
		{"more, as a sum", 1, 5, 9, 0, 8, 6},
		{"an older message", 1, 4, 9, 0, 20, 6},
		{"for another bucket, which had taken more", 1, 6, 9, 30, 33, 6},
		{"of an older epoch", 3, 7, 9, 8, 9, 7},
		{"of an older epoch, come late", 2, 8, 9, 8, 12, 7},
	} {
		say(step.epoch, step.version, step.burst, step.granted, step.grant)
		if got := left(); got != step.want {
			t.Errorf("%s: %d tokens, want %d", step.what, got, step.want)
		}
	}
	var reported schemas.Tokens
	ask := enforcer.Request{Tenant: "a", Cost: 1}
	e.Check(now, &ask)
	e.Collect(now, true, func(b enforcer.Bucket) { reported = b })
	if reported.Granted != 9 || reported.TokensLast != 6 || reported.Consistency != "lease" {
		t.Errorf("report %+v, want 9 granted, 6 left, of a lease", reported)
	}
	// without grants for half a time to live the part of the limit counts, and tokens stay
	now += int64(40 * time.Minute)
	if got := left(); got != 5 {
		t.Errorf("grants are over: %d tokens, want the 5 of half the limit", got)
	}
	say(3, 9, 9, 9, 9)
	e.Apply(enforcer.Update{Gateways: 2, TTL: time.Hour, Frozen: true})
	now++
	if got := e.Mode(); got != enforcer.Synced {
		t.Errorf("frozen: mode %s, want synced", got)
	}
}

// TestWhatIsGivenBackAfterAReportIsReported: a report that falls between a take and its return is followed by one that says so, also
// where the bucket is full again meanwhile or nobody asks for it any more.
func TestWhatIsGivenBackAfterAReportIsReported(t *testing.T) {
	fast, err := bucket.NewRate(1_000_000, 1, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	p := strictPolicy(t)
	p.Rules[0].Fixed.Rate = fast // full again at once
	p.Rules = append(p.Rules, limits.Rule{Name: "guard", Layer: limits.LayerGuard, Fixed: bucket.Limit{Rate: fast, Burst: 100_000}})
	for _, crowd := range []int{0, 20_000} { // so many that the table lets go of what is full and reported
		now := int64(time.Hour)
		e := enforcer.New(enforcer.Config{Stripes: 2, Ask: true, Clock: func() int64 { return now }})
		e.SetPolicy(p)
		e.Apply(enforcer.Update{Gateways: 1, TTL: time.Hour})
		cums, sums := map[string]uint64{}, map[string]uint64{}
		collect := func() {
			e.Collect(now, true, func(b enforcer.Bucket) {
				if b.Key != "a" && b.Key != "a|r" && b.Rule != "guard" {
					return
				}
				if b.Taken > 0 && b.Cum != sums[b.Rule]+b.Taken {
					t.Errorf("%d taken up to %d, after %d", b.Taken, b.Cum, sums[b.Rule])
				}
				cums[b.Rule] = b.Cum
				sums[b.Rule] += b.Taken
			})
		}
		for i := range crowd {
			e.Check(now, &enforcer.Request{Tenant: fmt.Sprint(i), Cost: 1})
		}
		collect()
		guard := cums["guard"]
		now += int64(time.Minute)
		q := enforcer.Request{Tenant: "a", Route: "r", Cost: 1}
		refuse := func(context.Context, schemas.TakeRequest) (schemas.TakeReply, error) {
			now += int64(time.Millisecond)
			collect()
			if cums["first"] != 1 || cums["guard"] != guard+1 {
				t.Fatalf("reported in between: %v, want 1 taken", cums)
			}
			return schemas.TakeReply{}, nil
		}
		if d := e.Settle(t.Context(), now, &q, e.Check(now, &q), refuse); d.Allowed {
			t.Fatalf("admitted: %+v", d)
		}
		collect()
		if cums["first"] != 0 || cums["last"] != 0 || cums["guard"] != guard {
			t.Errorf("reported afterwards: %v, want nothing taken", cums)
		}
		collect()
		d := e.Settle(t.Context(), now, &q, e.Check(now, &q), func(context.Context, schemas.TakeRequest) (schemas.TakeReply, error) {
			return schemas.TakeReply{Allowed: true}, nil
		})
		collect()
		if !d.Allowed || cums["first"] != 1 || sums["first"] != 1 || cums["guard"] != guard+1 || sums["guard"] != guard+1 {
			t.Errorf("after one that was admitted: %v, %v taken in all, want 1", cums, sums)
		}
	}
}
