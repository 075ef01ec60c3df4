package simulate

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weirhq/weir/internal/accesslog"
	"github.com/weirhq/weir/limits"
)

// writeFile writes text to a file of the test and returns its path.
func writeFile(t testing.TB, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func simulate(t testing.TB, log, policy string) Result {
	t.Helper()
	res, err := Run(context.Background(), Config{Log: log, Policy: policy})
	if err != nil {
		t.Fatal(err)
	}
	return res
}

const byIP = "version: 1\nidentity: {tenant: {client_ip: true}}\n"

var policies = map[string]string{
	"contract 1/s": byIP + `
plans: {std: {rate: 1/s, burst: 5}}
default_plan: std
rules:
  - {name: guard, layer: guard, key: [], rate: 1000000/s, burst: 1000000}
  - {name: contract, layer: contract, key: [tenant], limit: plan}
`,
	"contract 1/5s": byIP + `
rules:
  - {name: guard, layer: guard, key: [], rate: 1000000/s, burst: 1000000}
  - {name: contract, layer: contract, key: [tenant], rate: 1/5s, burst: 5}
`,
	"funnel": byIP + `
routes:
  - {name: presentations, match: {path: /presentations/**}}
rules:
  - {name: presentations, layer: route, key: [route], routes: [presentations], rate: 1/2s, burst: 10}
  - {name: contract, layer: contract, key: [tenant], rate: 1/5s, burst: 5}
  - {name: guard, layer: guard, key: [], rate: 3/s, burst: 20}
`,
}

// A day of a real site, if it is there: WEIR_ACCESS_LOG names it, else it is looked for beside the repository. TestSyntheticLog
// is the same kind of test on a log that is always there.
func TestRealLogNumbers(t *testing.T) {
	log := cmp.Or(os.Getenv("WEIR_ACCESS_LOG"), "../../../../shared/data/access.log.gz")
	if _, err := os.Stat(log); errors.Is(err, fs.ErrNotExist) && os.Getenv("WEIR_ACCESS_LOG") == "" {
		t.Logf("no %s here: only the synthetic log is tested", log)
		return
	}
	for name, want := range map[string]struct {
		rejected int
		byRule   map[string]int
		top      Tenant
	}{
		"contract 1/s":  {91, map[string]int{"guard": 0, "contract": 91}, Tenant{"198.18.0.97", 65}},
		"contract 1/5s": {1241, map[string]int{"guard": 0, "contract": 1241}, Tenant{"198.18.4.138", 242}},
		"funnel":        {1252, map[string]int{"guard": 0, "contract": 1228, "presentations": 24}, Tenant{"198.18.4.138", 242}},
	} {
		path := writeFile(t, "policy.yaml", policies[name])
		res := simulate(t, log, path)
		t.Logf("%s: %d requests, %d rejected %v, most of %v, %d tenants, %d unparsed", name, res.Requests, res.Rejected, res.ByRule, res.Top[0], res.Tenants, res.Unparsed)
		if res.Requests != 10000 || res.Rejected != want.rejected || res.Allowed != 10000-want.rejected || !reflect.DeepEqual(res.ByRule, want.byRule) ||
			res.Top[0] != want.top || res.Tenants != 1753 || res.Unparsed != 0 {
			t.Errorf("%s: got %+v\nwant %+v", name, res, want)
		}
		sameEveryTime(t, log, path, res)
	}
}

// sameEveryTime runs a simulation on one core and on two, and again.
func sameEveryTime(t *testing.T, log, policy string, want Result) {
	t.Helper()
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	for _, cores := range []int{1, 2, 2} {
		runtime.GOMAXPROCS(cores)
		if got := simulate(t, log, policy); !reflect.DeepEqual(got, want) {
			t.Errorf("on %d cores: %+v\nwant %+v", cores, got, want)
		}
	}
}

// The log in testdata has out of order, repeated and nanosecond times, three formats, several spellings of one path, IPv6
// clients, a line that lost its closing quote, two lines that are no requests and an end that is cut off. Its numbers come from
// the twin below.
func TestSyntheticLog(t *testing.T) {
	const policy = byIP + `
routes:
  - {name: export, match: {methods: [GET, HEAD], path: /report/export/**}}
  - {name: orders, match: {path: /orders/**}}
plans: {std: {rate: 10/13/s, burst: 3}, slow: {rate: 3/m, burst: 2}}
tenants:
  198.51.100.1: {plan: std, rate: 1/2s}
  "2001:db8:0:5::": {plan: slow}
default_plan: std
rules:
  - {name: per-route, layer: route, key: [route], rate: 1/9/s, burst: 4, routes: [export]}
  - {name: guard, layer: guard, key: [], rate: 19/20/s, burst: 10}
  - {name: contract, layer: contract, key: [tenant], limit: plan}
  - {name: agents, layer: contract, key: ["header:User-Agent", user], rate: 7/11/s, burst: 20, mode: shadow}
`
	path := writeFile(t, "policy.yaml", policy)
	res := simulate(t, "testdata/access.log", path)
	if res.Unparsed != 3 || len(res.Log.Problems) != 3 || !res.Log.CutOff {
		t.Errorf("%d unparsed, %+v; want 3, and a log that is cut off", res.Unparsed, res.Log)
	}
	p, err := limits.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	entries, _, err := accesslog.Load(context.Background(), "testdata/access.log")
	if err != nil {
		t.Fatal(err)
	}
	per := func(num, den int64) *big.Rat { return big.NewRat(num, den) }
	tw := twin{rules: []*twinRule{
		{name: "guard", key: func(*twinRequest) string { return "" }, rate: per(19, 20), burst: 10},
		{name: "contract", key: func(q *twinRequest) string { return q.tenant }, limitOf: func(tenant string) (*big.Rat, int64) {
			switch tenant {
			case "198.51.100.1":
				return per(1, 2), 3
			case "2001:db8:0:5::":
				return per(3, 60), 2
			}
			return per(10, 13), 3
		}},
		{name: "per-route", key: func(q *twinRequest) string { return q.route }, route: "export", rate: per(1, 9), burst: 4},
		{name: "agents", key: func(q *twinRequest) string { return q.agent }, rate: per(7, 11), burst: 20, shadow: true},
	}}
	for i := range entries {
		q := request(p, &entries[i])
		tw.take(&twinRequest{ns: entries[i].Time.UnixNano(), tenant: q.Tenant, route: q.Route, agent: entries[i].Agent + "\x00" + q.User})
	}
	tw.check(t, res)
	if res.Requests != 420 || res.Rejected != 119 || res.Tenants != 38 {
		t.Errorf("%d of %d requests of %d tenants rejected, want 119 of 420 of 38", res.Rejected, res.Requests, res.Tenants)
	}
	if want := map[string]int{"guard": 15, "contract": 13, "per-route": 91}; !reflect.DeepEqual(res.ByRule, want) {
		t.Errorf("by rule %v, want %v", res.ByRule, want)
	}
	sameEveryTime(t, "testdata/access.log", path, res)
}

// twin is the obviously right limiter: rational numbers, one map per rule, two passes.
type twin struct {
	rules    []*twinRule // in funnel order
	requests int
	rejected map[string]int // by tenant
}

type twinRule struct {
	name    string
	key     func(*twinRequest) string
	limitOf func(tenant string) (*big.Rat, int64) // else the next two
	rate    *big.Rat                              // tokens per second; nil for unlimited
	burst   int64
	route   string // the only one it applies to, "" for all
	shadow  bool

	buckets map[string]*twinBucket
	refused int
}

type twinBucket struct {
	tokens *big.Rat
	ns     int64
}

type twinRequest struct {
	ns                   int64
	tenant, route, agent string
}

// bucket is q's bucket, refilled, or nil if the rule has no limit for it.
func (r *twinRule) bucket(q *twinRequest) *twinBucket {
	rate, burst := r.rate, r.burst
	if r.limitOf != nil {
		rate, burst = r.limitOf(q.tenant)
	}
	if rate == nil {
		return nil
	}
	full := new(big.Rat).SetInt64(burst)
	if r.buckets == nil {
		r.buckets = map[string]*twinBucket{}
	}
	b := r.buckets[r.key(q)]
	if b == nil {
		b = &twinBucket{tokens: full, ns: q.ns}
		r.buckets[r.key(q)] = b
	}
	gain := new(big.Rat).Mul(rate, big.NewRat(q.ns-b.ns, 1e9))
	b.tokens = gain.Add(gain, b.tokens)
	if b.tokens.Cmp(full) > 0 {
		b.tokens = full
	}
	b.ns = q.ns
	return b
}

func (tw *twin) take(q *twinRequest) {
	one := big.NewRat(1, 1)
	tw.requests++
	if tw.rejected == nil {
		tw.rejected = map[string]int{}
	}
	tw.rejected[q.tenant] += 0
	var paying []*twinBucket
	for _, r := range tw.rules {
		if r.shadow || r.route != "" && r.route != q.route {
			continue
		}
		b := r.bucket(q)
		if b == nil {
			continue
		}
		if b.tokens.Cmp(one) < 0 {
			r.refused++
			tw.rejected[q.tenant]++
			return
		}
		paying = append(paying, b)
	}
	for _, b := range paying {
		b.tokens = new(big.Rat).Sub(b.tokens, one)
	}
	for _, r := range tw.rules {
		if !r.shadow || r.route != "" && r.route != q.route {
			continue
		}
		switch b := r.bucket(q); {
		case b == nil:
		case b.tokens.Cmp(one) < 0:
			r.refused++
		default:
			b.tokens = new(big.Rat).Sub(b.tokens, one)
		}
	}
}

// check compares a simulation with the twin.
func (tw *twin) check(t *testing.T, res Result) {
	t.Helper()
	want := Result{Requests: tw.requests, Tenants: len(tw.rejected), ByRule: map[string]int{}, Shadow: map[string]int{}, Top: []Tenant{}}
	for _, r := range tw.rules {
		if r.shadow {
			want.Shadow[r.name] = r.refused
		} else {
			want.ByRule[r.name] = r.refused
			want.Rejected += r.refused
		}
	}
	want.Allowed = want.Requests - want.Rejected
	for tenant, n := range tw.rejected {
		if n > 0 {
			want.Top = append(want.Top, Tenant{tenant, n})
		}
	}
	slices.SortFunc(want.Top, func(x, y Tenant) int { return strings.Compare(x.Tenant, y.Tenant) })
	slices.SortStableFunc(want.Top, func(x, y Tenant) int { return y.Rejected - x.Rejected })
	want.Top = want.Top[:min(10, len(want.Top))]
	want.Unparsed, want.Log, want.Warnings, want.rules = res.Unparsed, res.Log, res.Warnings, res.rules
	if !reflect.DeepEqual(res, want) {
		t.Errorf("got  %+v\nwant %+v", res, want)
	}
}

// Random logs under random policies with odd rates give exactly what rational arithmetic gives.
func TestEqualsRationalTwin(t *testing.T) {
	type oddRate struct {
		text string
		rate *big.Rat
	}
	rates := []oddRate{
		{"10/13/s", big.NewRat(10, 13)}, {"3/m", big.NewRat(3, 60)}, {"65535/s", big.NewRat(65535, 1)}, {"1/7/s", big.NewRat(1, 7)}, {"0.1/s", big.NewRat(1, 10)},
		{"1.7/3s", big.NewRat(17, 30)}, {"999999937/1000000007/s", big.NewRat(999999937, 1000000007)}, {"1/3d", big.NewRat(1, 3*86400)}, {"1000000000/s", big.NewRat(1e9, 1)},
		{"7/1ms", big.NewRat(7000, 1)}, {"3/11ns", big.NewRat(3e9, 11)}, {"0.333333333/s", big.NewRat(333333333, 1e9)}, {"0", new(big.Rat)}, {"unlimited", nil},
	}
	const seeds = 60
	total := 0
	for seed := range uint64(seeds) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(seed, 42))
			pick := func(n int) int { return rnd.IntN(n) }
			anyRate := func(from []oddRate) (oddRate, int64) {
				r := from[pick(len(from))]
				burst := int64(1 + pick(1+pick(12)))
				if r.rate != nil && r.rate.Sign() == 0 {
					burst = 0
				}
				return r, burst
			}
			limit := func(r oddRate, burst int64) string { return fmt.Sprintf("rate: %s, burst: %d", r.text, max(burst, 1)) }

			// The policy, and the twin's rules beside it.
			var guards, contracts, routes []*twinRule
			var lines []string
			g, gb := anyRate(rates[:len(rates)-2])
			gb += 5
			lines = append(lines, "{name: guard, layer: guard, key: [], "+limit(g, gb)+"}")
			guards = append(guards, &twinRule{name: "guard", key: func(*twinRequest) string { return "" }, rate: g.rate, burst: gb})
			std, stdBurst := anyRate(rates)
			vip, vipBurst := anyRate(rates)
			lines = append(lines, "{name: contract, layer: contract, key: [tenant], limit: plan}")
			contracts = append(contracts, &twinRule{name: "contract", key: func(q *twinRequest) string { return q.tenant }, limitOf: func(tenant string) (*big.Rat, int64) {
				if tenant == "t0" {
					return vip.rate, vipBurst
				}
				return std.rate, stdBurst
			}})
			for i := range pick(4) {
				r, burst := anyRate(rates)
				rule := &twinRule{name: fmt.Sprint("r", i), rate: r.rate, burst: burst, shadow: pick(4) == 0}
				layer, key, extra := "route", "route", ""
				rule.key = func(q *twinRequest) string { return q.route }
				if pick(2) == 0 {
					layer, key = "contract", "route, tenant"
					rule.key = func(q *twinRequest) string { return q.route + "\x00" + q.tenant }
				}
				if pick(2) == 0 {
					rule.route, extra = "a", ", routes: [a]"
				}
				if rule.shadow {
					extra += ", mode: shadow"
				}
				lines = append(lines, fmt.Sprintf("{name: r%d, layer: %s, key: [%s], %s%s}", i, layer, key, limit(r, burst), extra))
				if layer == "route" {
					routes = append(routes, rule)
				} else {
					contracts = append(contracts, rule)
				}
			}
			// Layers may be mixed in the file; inside one the order of the file counts, so the lines stay in order here.
			policy := "version: 1\nidentity: {tenant: {header: X-App-Key}}\nroutes:\n  - {name: a, match: {path: /a/**}}\n  - {name: b, match: {path: /b}}\n" +
				"plans:\n  std: {" + limit(std, stdBurst) + "}\n  vip: {" + limit(vip, vipBurst) + "}\ntenants:\n  t0: {plan: vip}\ndefault_plan: std\nrules:\n  - " + strings.Join(lines, "\n  - ") + "\n"

			// The log, in which the time goes back and forth, and the same requests in order for the twin.
			gaps := []int64{0, 0, 1, 1e9, 13e8, 13e8 - 1, 13e8 + 1, 20e9, 20e9 - 1, 15259, 333, 86400e9 * 3, 7e9, 11}
			var requests []*twinRequest
			ns := time.Date(2026, 11, 29, 10, 0, 0, 123456789, time.UTC).UnixNano()
			few := gaps[pick(len(gaps)):]
			few = few[:1+pick(len(few))]
			for range 400 {
				ns += few[pick(len(few))]
				requests = append(requests, &twinRequest{ns: ns, tenant: fmt.Sprint("t", pick(1+pick(6))), route: []string{"a", "b", "other"}[pick(3)]})
			}
			for range pick(100) {
				i, j := pick(len(requests)), pick(len(requests))
				requests[i], requests[j] = requests[j], requests[i]
			}
			var log bytes.Buffer
			zones := []*time.Location{time.UTC, time.FixedZone("", 8*3600), time.FixedZone("", -3*3600-1800)}
			paths := map[string][]string{"a": {"/a", "/a/x", "/a//%78?y=1"}, "b": {"/b", "/b?x=/a", "/a/../b"}, "other": {"/", "/aa", "/b/"}}
			for _, q := range requests {
				at := time.Unix(0, q.ns).In(zones[pick(3)])
				fmt.Fprintf(&log, `{"ts":%q,"ip":"192.0.2.1","method":"GET","path":%q,"tenant":%q}`+"\n", at.Format(time.RFC3339Nano), paths[q.route][pick(3)], q.tenant)
			}
			slices.SortStableFunc(requests, func(x, y *twinRequest) int { return cmp.Compare(x.ns, y.ns) })
			tw := twin{rules: slices.Concat(guards, contracts, routes)}
			for _, q := range requests {
				tw.take(q)
			}
			res := simulate(t, writeFile(t, "log.json", log.String()), writeFile(t, "policy.yaml", policy))
			if len(res.Shadow) == 0 {
				res.Shadow = map[string]int{}
			}
			tw.check(t, res)
			total += res.Rejected
			if t.Failed() {
				t.Logf("policy:\n%s", policy)
			}
		})
	}
	if total < seeds*400/10 || total > seeds*400*9/10 {
		t.Errorf("%d of %d refused: the policies are not a test", total, seeds*400)
	}
}

// Who a request is from, by every kind of identity.
func TestIdentity(t *testing.T) {
	log := writeFile(t, "log", `2001:db8:1:2:3:4:5:6 - alice [29/Nov/2026:10:00:00 +0000] "GET /?appkey=k%31&x=1 HTTP/1.1" 200 1 "-" "agent"
2001:db8:1:2::9 - - [29/Nov/2026:10:00:00 +0000] "GET / HTTP/1.1" 200 1 "-" "agent"
198.51.100.7 - alice [29/Nov/2026:10:00:00 +0000] "GET /?appkey=k1 HTTP/1.1" 200 1
{"ts":"2026-11-29T10:00:00Z","ip":"198.51.100.7:4711","path":"/","tenant":"k1","headers":{"x-app-key":" k2 "}}
{"ts":"2026-11-29T10:00:00Z","client":"host.example.com","path":"/?appkey=%zz"}
`)
	for identity, want := range map[string][]Tenant{
		"{client_ip: true}":    {{"198.51.100.7", 2}, {"2001:db8:1:2::", 2}, {"host.example.com", 1}},
		"{basic: user}":        {{"alice", 2}, {"anonymous", 2}, {"k1", 1}},
		"{query: appkey}":      {{"k1", 3}, {"anonymous", 2}},
		"{header: x-app-key}":  {{"anonymous", 4}, {"k2", 1}},
		"{header: User-Agent}": {{"agent", 2}, {"anonymous", 2}, {"k1", 1}},
	} {
		policy := writeFile(t, "policy.yaml", "version: 1\nidentity: {tenant: "+identity+"}\nrules:\n  - {name: guard, layer: guard, key: [], rate: 0}\n")
		if res := simulate(t, log, policy); !reflect.DeepEqual(res.Top, want) {
			t.Errorf("%s: %v, want %v", identity, res.Top, want)
		}
	}
}

func TestOutput(t *testing.T) {
	res := Result{
		Requests: 12, Allowed: 9, Rejected: 3, Unparsed: 1, Tenants: 4, ByRule: map[string]int{"guard": 0, "contract": 3}, Shadow: map[string]int{"per-ip": 2},
		Top: []Tenant{{"a<b", 2}, {"x\x1b[2J", 1}, {"y\u202ez", 1}}, rules: []string{"guard", "contract", "per-ip"},
	}
	var table, doc bytes.Buffer
	if err := res.WriteTable(&table); err != nil {
		t.Fatal(err)
	}
	want := `REQUESTS  ALLOWED  REJECTED  UNPARSED  TENANTS
12        9        3         1         4

RULE      REJECTED
guard     0
contract  3
per-ip    2 (shadow)

TENANT      REJECTED
a<b         2
"x\x1b[2J"  1
"y\u202ez"  1
`
	if table.String() != want {
		t.Errorf("table:\n%s\nwant:\n%s", table.String(), want)
	}
	if err := res.WriteJSON(&doc); err != nil {
		t.Fatal(err)
	}
	var compact bytes.Buffer
	if err := json.Compact(&compact, doc.Bytes()); err != nil {
		t.Fatal(err)
	}
	want = `{"requests":12,"allowed":9,"rejected":3,"unparsed":1,"tenants":4,"by_rule":{"contract":3,"guard":0},"shadow":{"per-ip":2},"top":[{"tenant":"a<b","rejected":2},{"tenant":"x\u001b[2J","rejected":1},{"tenant":"y` + "\u202e" + `z","rejected":1}]}`
	if compact.String() != want {
		t.Errorf("JSON:\n%s\nwant:\n%s", compact.String(), want)
	}
}

func TestRunErrors(t *testing.T) {
	policy := writeFile(t, "policy.yaml", policies["funnel"])
	log := writeFile(t, "log", "")
	ctx := context.Background()
	if _, err := Run(ctx, Config{Log: log + "x", Policy: policy}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing log: %v", err)
	}
	if _, err := Run(ctx, Config{Log: log, Policy: policy + "x"}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing policy: %v", err)
	}
	if _, err := Run(ctx, Config{Log: log, Policy: writeFile(t, "bad.yaml", "version: 1\n")}); err == nil || !strings.Contains(err.Error(), "bad.yaml:1: no rule has layer: guard") {
		t.Errorf("bad policy: %v", err)
	}
	res, err := Run(ctx, Config{Log: log, Policy: policy})
	if err != nil || res.Requests != 0 || res.Top == nil {
		t.Errorf("empty log: %+v, %v", res, err)
	}
	ctx, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := Run(ctx, Config{Log: "testdata/access.log", Policy: policy}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	var told [][2]int
	if _, err := Run(context.Background(), Config{Log: "testdata/access.log", Policy: policy, Progress: func(done, total int) { told = append(told, [2]int{done, total}) }}); err != nil {
		t.Fatal(err)
	}
	if want := [][2]int{{0, 420}, {420, 420}}; !reflect.DeepEqual(told, want) {
		t.Errorf("progress %v, want %v", told, want)
	}
}
