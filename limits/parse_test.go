package limits

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"math/big"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weirhq/weir/enforcer/bucket"
)

var update = flag.Bool("update", false, "rewrite golden files")

const guardRule = "  - {name: guard, layer: guard, key: [], rate: 13000/s, burst: 26000}\n"

func mustParse(t testing.TB, text string) *Policy {
	t.Helper()
	p, err := Parse("p.yaml", []byte(text))
	if err != nil {
		t.Fatalf("Parse: %v\n%s", err, text)
	}
	return p
}

func rate(t testing.TB, num, den uint64, per time.Duration) bucket.Rate {
	t.Helper()
	r, err := bucket.NewRate(num, den, per)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestParseContractExample(t *testing.T) {
	p, err := Load("testdata/contract.yaml")
	if err != nil {
		t.Fatal(err)
	}
	wantIdentity := Identity{TenantName: "X-App-Key", TrustedProxies: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}, IPv6Prefix: 64}
	if !reflect.DeepEqual(p.Identity, wantIdentity) {
		t.Errorf("Identity = %+v, want %+v", p.Identity, wantIdentity)
	}
	standard := bucket.Limit{Rate: rate(t, 80, 1, time.Second), Burst: 160}
	gold := bucket.Limit{Rate: rate(t, 400, 1, time.Second), Burst: 800}
	wantPlans := map[string]Plan{
		"standard": {Limit: standard, Quota: &Quota{Limit: 1000000, Per: "month", Timezone: "Asia/Shanghai"}},
		"gold":     {Limit: gold},
	}
	if !reflect.DeepEqual(p.Plans, wantPlans) {
		t.Errorf("Plans = %+v, want %+v", p.Plans, wantPlans)
	}
	wantTenants := map[string]Tenant{"acme": {Plan: "gold", Limit: gold, Owner: Owner{Webhook: "https://hooks.example.com/weir"}}}
	if !reflect.DeepEqual(p.Tenants, wantTenants) {
		t.Errorf("Tenants = %+v, want %+v", p.Tenants, wantTenants)
	}
	wantRules := []Rule{
		{Name: "guard", Layer: LayerGuard, Fixed: bucket.Limit{Rate: rate(t, 13000, 1, time.Second), Burst: 26000}},
		{Name: "contract", Layer: LayerContract, Key: []Dimension{{Kind: ByTenant}}, ByPlan: true},
		{Name: "per-ip", Layer: LayerContract, Key: []Dimension{{Kind: ByIP}}, Mode: Shadow, Fixed: bucket.Limit{Rate: rate(t, 20, 1, time.Second), Burst: 40}},
		{Name: "export", Layer: LayerRoute, Key: []Dimension{{Kind: ByRoute}}, Routes: []string{"export"}, Fixed: bucket.Limit{Rate: rate(t, 5, 1, time.Second), Burst: 10}},
	}
	for i := range p.Rules {
		if len(p.Rules[i].Key) == 0 {
			p.Rules[i].Key = nil
		}
	}
	if !reflect.DeepEqual(p.Rules, wantRules) {
		t.Errorf("Rules = %+v, want %+v", p.Rules, wantRules)
	}
	contract := &p.Rules[1]
	for tenant, want := range map[string]bucket.Limit{"acme": gold, "nobody": standard, "": standard} {
		if got, ok := contract.Limit(p, tenant); !ok || got != want {
			t.Errorf("Limit(%q) = %+v, %v, want %+v, true", tenant, got, ok, want)
		}
	}
	if got, want := p.Warnings(), []string{"quota of plan standard is recorded, not enforced by this version"}; !slices.Equal(got, want) {
		t.Errorf("Warnings = %q, want %q", got, want)
	}
}

func TestEveryMistakeAtOnce(t *testing.T) {
	files, err := filepath.Glob("testdata/errors/*.yaml")
	if err != nil || len(files) < 15 {
		t.Fatalf("testdata/errors has %d files, %v", len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".yaml"), func(t *testing.T) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			p, err := Parse(filepath.Base(file), data)
			if err == nil || p != nil {
				t.Fatalf("Parse = %v, %v, want an error and no policy", p, err)
			}
			golden := strings.TrimSuffix(file, ".yaml") + ".golden"
			got := err.Error() + "\n"
			if *update {
				if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("got\n%swant\n%s", got, want)
			}
		})
	}
}

// Every error of a policy is an *Error with the file and a line that exists, and no error contains a credential.
func TestErrorsHavePlaces(t *testing.T) {
	data, err := os.ReadFile("testdata/errors/everything.yaml")
	if err != nil {
		t.Fatal(err)
	}
	_, err = Parse("x.yaml", data)
	all := err.(interface{ Unwrap() []error }).Unwrap()
	if len(all) < 50 {
		t.Errorf("%d mistakes, want at least 50", len(all))
	}
	for _, err := range all {
		e, ok := errors.AsType[*Error](err)
		if !ok || e.File != "x.yaml" || e.Line < 1 || e.Line > bytes.Count(data, []byte("\n")) {
			t.Errorf("%v: want an *Error with file and line", err)
		}
		if strings.Contains(err.Error(), "secret") {
			t.Errorf("%v: shows a credential", err)
		}
	}
}

func TestManyMistakesAreCut(t *testing.T) {
	var b strings.Builder
	b.WriteString("version: 1\nrules:\n" + guardRule)
	for i := range 1000 {
		fmt.Fprintf(&b, "key%d: 1\n", i)
	}
	_, err := Parse("p.yaml", []byte(b.String()))
	all := err.(interface{ Unwrap() []error }).Unwrap()
	if len(all) != maxErrors+1 || !strings.Contains(all[maxErrors].Error(), "and 900 more mistakes") {
		t.Errorf("%d errors, the last of them %v; want 101 and the number of the rest", len(all), all[len(all)-1])
	}
}

func TestRates(t *testing.T) {
	for text, want := range map[string]bucket.Limit{
		"80/s":         {Rate: rate(t, 80, 1, time.Second), Burst: 80},
		"3/m":          {Rate: rate(t, 3, 1, time.Minute), Burst: 1},
		"7200/h":       {Rate: rate(t, 2, 1, time.Second), Burst: 2},
		"1/d":          {Rate: rate(t, 1, 1, 24*time.Hour), Burst: 1},
		"1/30d":        {Rate: rate(t, 1, 1, 30*24*time.Hour), Burst: 1},
		"1/15s":        {Rate: rate(t, 1, 1, 15*time.Second), Burst: 1},
		"31/15s":       {Rate: rate(t, 31, 1, 15*time.Second), Burst: 3},
		"1/1h30m":      {Rate: rate(t, 1, 1, 90*time.Minute), Burst: 1},
		"5/100ms":      {Rate: rate(t, 50, 1, time.Second), Burst: 50},
		"10/13/s":      {Rate: rate(t, 10, 13, time.Second), Burst: 1},
		"10/13s":       {Rate: rate(t, 10, 13, time.Second), Burst: 1},
		"20/13/2s":     {Rate: rate(t, 10, 13, time.Second), Burst: 1},
		"0.1/s":        {Rate: rate(t, 1, 10, time.Second), Burst: 1},
		"0.5/m":        {Rate: rate(t, 1, 2, time.Minute), Burst: 1},
		"1.5/s":        {Rate: rate(t, 3, 2, time.Second), Burst: 2},
		"65535/s":      {Rate: rate(t, 65535, 1, time.Second), Burst: 65535},
		"1000000000/s": {Rate: rate(t, 1e9, 1, time.Second), Burst: 1e9},
		"0":            {},
		"0/s":          {},
		"0.0/h":        {},
		"unlimited":    {Unlimited: true},
	} {
		got, err := parseRate(text)
		if l := (limitText{rate: got.rate, perSecond: got.perSecond, deny: got.deny, unlimited: got.unlimited}).limit(); err != nil || l != want {
			t.Errorf("parseRate(%q) = %+v, %v, want %+v", text, l, err, want)
		}
	}
	for _, text := range []string{
		"", "5", "5/", "/s", "5/x", "five", "-5/s", "+5/s", "5/-1s", "5/+1s", "1e3/s", "0x10/s", "1_000/s", "5 /s", "5/ s", "5/s ", "NaN/s", "Inf/s", ".5/s", "5./s",
		"1/2/3/s", "1.5/2/s", "10/13", "5/0s", "5/0d", "5/0/s", "5/0.s", "2000000000/s", "9223372036854775807/s", "99999999999999999999/s", "1/99999999999999999/d",
		"0.0000000000000000000000001/s", "5/99999999d", "Unlimited", "unlimited/s", "10/13 /s", "5/us", "5/S",
	} {
		if got, err := parseRate(text); err == nil {
			t.Errorf("parseRate(%q) = %+v, want an error", text, got)
		}
	}
}

// The rate of a policy is the number that was written, not one near it.
func TestB056RatesAreExact(t *testing.T) {
	p := mustParse(t, "version: 1\nrules:\n"+guardRule+`
  - {name: a, layer: contract, key: [tenant], rate: 0.1/s, burst: 1}
  - {name: b, layer: contract, key: [tenant], rate: 0.5/m, burst: 1}
  - {name: c, layer: contract, key: [tenant], rate: 10/13/s, burst: 1}
`)
	want := []*big.Rat{big.NewRat(1, 10e9), big.NewRat(1, 120e9), big.NewRat(10, 13e9)}
	for i, w := range want {
		l := p.Rules[i+1].Fixed
		if got := new(big.Rat).SetFrac(new(big.Int).SetUint64(l.Rate.Num), new(big.Int).SetUint64(l.Rate.Den)); got.Cmp(w) != 0 {
			t.Errorf("rule %s = %v tokens per ns, want %v", p.Rules[i+1].Name, got, w)
		}
	}
	for i, c := range []struct {
		every   time.Duration
		asks    int
		allowed int
	}{{time.Second, 61, 7}, {time.Second, 601, 6}} {
		l := p.Rules[i+1].Fixed
		s, allowed := bucket.Full(l, 0), 0
		for n := range c.asks {
			if s.Take(l, int64(n)*int64(c.every), 1).Allowed {
				allowed++
			}
		}
		if allowed != c.allowed {
			t.Errorf("rule %s allowed %d, want %d", p.Rules[i+1].Name, allowed, c.allowed)
		}
	}
}

func TestB003ZeroDeniesAndUnlimitedIsAWord(t *testing.T) {
	p := mustParse(t, "version: 1\nplans:\n  none: {rate: 0}\n  none5: {rate: 0, burst: 5}\n  all: {rate: unlimited}\ntenants:\n  a: {plan: none}\n  b: {plan: none5}\n  c: {plan: all}\n"+
		"default_plan: deny\nrules:\n"+guardRule+"  - {name: contract, layer: contract, key: [tenant], limit: plan}\n")
	for tenant, want := range map[string]int{"a": 0, "b": 0, "c": 10, "nobody": 0} {
		l, ok := p.Rules[1].Limit(p, tenant)
		if ok != (tenant != "nobody") {
			t.Errorf("Limit(%q) = _, %v", tenant, ok)
		}
		s, allowed := bucket.Full(l, 0), 0
		for range 10 {
			if s.Take(l, 0, 1).Allowed {
				allowed++
			}
		}
		if allowed != want {
			t.Errorf("tenant %s: %d of 10 allowed, want %d", tenant, allowed, want)
		}
	}
	for _, bad := range []string{"rate: 5/s, burst: 0", "rate: -5/s, burst: 5", "rate: 9223372036854775807/s", "rate: 5/s, burst: 9223372036854775807"} {
		if _, err := Parse("p.yaml", []byte("version: 1\nrules:\n"+guardRule+"  - {name: x, layer: contract, key: [tenant], "+bad+"}\n")); err == nil || !strings.Contains(err.Error(), "p.yaml:4") {
			t.Errorf("%s: %v, want an error in line 4", bad, err)
		}
	}
}

func TestB077DuplicatesAndUnknownKeysAreErrors(t *testing.T) {
	head := "version: 1\nplans:\n  p1: {rate: 1/s}\n  p20: {rate: 20/s}\ndefault_plan: p1\nrules:\n" + guardRule + "  - {name: contract, layer: contract, key: [tenant], limit: plan}\n"
	for _, c := range []struct{ tail, want string }{
		{"tenants:\n  acme: {plan: p1}\n  acme: {plan: p20}\n", "p.yaml:11: tenants.acme: duplicate: already given at p.yaml:10"},
		{"tenants:\n  acme: {plan: p1, burts: 5}\n", "p.yaml:10: tenants.acme.burts: unknown key (known are burst, owner, plan, rate)"},
		{"tenants:\n  acme: {plan: p1, plan: p20}\n", "p.yaml:10: tenants.acme.plan: duplicate: already given at p.yaml:10"},
		{"default_plan: p20\n", "p.yaml:9: default_plan: duplicate: already given at p.yaml:5"},
	} {
		p, err := Parse("p.yaml", []byte(head+c.tail))
		if err == nil || err.Error() != c.want || p != nil {
			t.Errorf("Parse = %v, %v, want no policy and %s", p, err, c.want)
		}
	}
}

// Names that look alike once joined are two fields.
func TestB021NamesDoNotCollide(t *testing.T) {
	p := mustParse(t, "version: 1\nplans:\n  plan: {rate: 1/s}\n  b: {rate: 2/s}\ndefault_plan: deny\ntenants:\n  a: {plan: b}\n  a.plan: {plan: plan}\n  'a:b': {plan: b}\n  'a|b': {plan: b}\n  '\"a\".plan': {plan: b}\n  007: {plan: b}\nrules:\n"+
		guardRule+"  - {name: contract, layer: contract, key: [tenant], limit: plan}\n")
	if len(p.Tenants) != 6 || p.Tenants["a.plan"].Plan != "plan" || p.Tenants["007"].Plan != "b" {
		t.Errorf("Tenants = %v", p.Tenants)
	}
}

// Names in a policy become subject tokens and metric labels; tenants may be anything readable, for they never do.
func TestB020Names(t *testing.T) {
	head := "version: 1\nplans:\n  p: {rate: 1/s}\ndefault_plan: p\nrules:\n" + guardRule + "  - {name: contract, layer: contract, key: [tenant], limit: plan}\n"
	for _, name := range []string{"a b", "a.b", "*", ">", "$JS.API.>", "..", "ключ"} {
		q := fmt.Sprintf("%q", name)
		if p := mustParse(t, head+"tenants:\n  "+q+": {plan: p}\n"); p.Tenants[name].Plan != "p" {
			t.Errorf("tenant %q is not known", name)
		}
		if _, err := Parse("p.yaml", []byte(head+"  - {name: "+q+", layer: contract, key: [ip], rate: 1/s}\n")); err == nil || !strings.Contains(err.Error(), "p.yaml:8: rules[2].name") {
			t.Errorf("rule %q: %v, want an error", name, err)
		}
	}
	for _, name := range []string{`"a\tb"`, `"a\r\nPUB x 0\r\n"`, `""`, `"a\0b"`, strings.Repeat("k", 5000)} {
		if _, err := Parse("p.yaml", []byte(head+"tenants:\n  "+name+": {plan: p}\n")); err == nil {
			t.Errorf("tenant %.40s is taken, want an error", name)
		}
	}
}

func TestTenantOverrides(t *testing.T) {
	p := mustParse(t, `version: 1
plans: {std: {rate: 80/s, burst: 160}}
default_plan: std
tenants:
  both: {plan: std, rate: 5/s, burst: 7}
  rate: {rate: 5/s}
  burst: {plan: std, burst: 7}
  none: {plan: std, rate: 0}
  all: {plan: std, rate: unlimited}
rules:
`+guardRule+"  - {name: contract, layer: contract, key: [tenant], limit: plan}\n")
	five, eighty := rate(t, 5, 1, time.Second), rate(t, 80, 1, time.Second)
	for tenant, want := range map[string]bucket.Limit{
		"both": {Rate: five, Burst: 7}, "rate": {Rate: five, Burst: 160}, "burst": {Rate: eighty, Burst: 7}, "none": {}, "all": {Unlimited: true},
	} {
		if got, ok := p.TenantLimit(tenant); !ok || got != want {
			t.Errorf("TenantLimit(%q) = %+v, %v, want %+v", tenant, got, ok, want)
		}
	}
}

// The version depends on what the policy says and on nothing else.
func TestVersion(t *testing.T) {
	base := "version: 1\nplans: {a: {rate: 1/s, burst: 1}, b: {rate: 2/s, burst: 1}}\ndefault_plan: a\nrules:\n" + guardRule + "  - {name: contract, layer: contract, key: [tenant], limit: plan}\n"
	p := mustParse(t, base)
	if p.Version == 0 || p.Version >= 1<<48 {
		t.Errorf("Version = %#x, want 48 bits", p.Version)
	}
	same := []string{
		"# a comment\n" + base,
		strings.Replace(base, "a: {rate: 1/s, burst: 1}, b: {rate: 2/s, burst: 1}", "b: {burst: 1, rate: 120/m}, a: {rate: 1.0/s}", 1),
		strings.Replace(base, "key: [tenant]", "mode: enforce, key: [tenant]", 1),
	}
	for _, text := range same {
		if q := mustParse(t, text); q.Version != p.Version {
			t.Errorf("Version = %#x, want %#x, for\n%s", q.Version, p.Version, text)
		}
	}
	for _, change := range [][2]string{{"2/s", "3/s"}, {"default_plan: a", "default_plan: b"}, {"26000", "26001"}, {"name: contract", "name: other"}, {"key: [tenant]", "key: [tenant, ip]"}} {
		if q := mustParse(t, strings.Replace(base, change[0], change[1], 1)); q.Version == p.Version {
			t.Errorf("Version stays %#x when %s becomes %s", p.Version, change[0], change[1])
		}
	}
}

func TestFolder(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("10-base.yaml", "version: 1\nplans: {std: {rate: 1/s}}\ndefault_plan: std\nroutes:\n  - {name: a, match: {path: /a/**}}\nrules:\n"+guardRule)
	write("20-more.yml", "version: 1\nplans: {gold: {rate: 9/s}}\nroutes:\n  - {name: b, match: {path: /a/b}}\nrules:\n  - {name: contract, layer: contract, key: [tenant], limit: plan}\n")
	write("30-tenants.yaml", "version: 1\ntenants: {acme: {plan: gold}}\n")
	one, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(one.Routes) != 2 || one.Route("GET", "/a/b") != "a" || len(one.Rules) != 2 || len(one.Plans) != 2 || one.Tenants["acme"].Plan != "gold" {
		t.Errorf("policy = %+v", one)
	}

	// B078: what an editor leaves behind is not policy.
	for _, name := range []string{".limits.yaml.swp", ".hidden.yaml", "limits.yaml~", "limits.yaml.bak", "#limits.yaml#", "#x.yaml", "limits.swp", "README.md", "limits.yaml.orig"} {
		write(name, "\x00\xff not: [policy")
	}
	if err := os.Mkdir(filepath.Join(dir, "folder.yaml"), 0o755); err != nil {
		t.Fatal(err)
	}
	two, err := Load(dir)
	if err != nil || two.Version != one.Version {
		t.Fatalf("Load = %v, %v, want the same policy", two, err)
	}

	// What two files both say is an error that names both, and so is each file's own mistake.
	write("40-again.yaml", "version: 1\nplans: {std: {rate: 2/s}}\ndefault_plan: gold\nrules:\n"+guardRule)
	write("50-empty.yaml", "")
	_, err = Load(dir)
	f := func(s string) string { return filepath.Join(dir, s) }
	want := strings.Join([]string{
		f("40-again.yaml") + ":2: plans.std: duplicate: already given at " + f("10-base.yaml") + ":2",
		f("40-again.yaml") + ":3: default_plan: duplicate: already given at " + f("10-base.yaml") + ":3",
		f("40-again.yaml") + ":5: rules[0].name: duplicate: already given at " + f("10-base.yaml") + ":7",
		f("50-empty.yaml") + ":1: file is empty",
	}, "\n")
	if err == nil || err.Error() != want {
		t.Errorf("Load = %v\nwant %s", err, want)
	}

	if _, err := Load(t.TempDir()); err == nil || !strings.Contains(err.Error(), "folder without") {
		t.Errorf("Load of an empty folder = %v", err)
	}
	if _, err := Load(filepath.Join(dir, "none.yaml")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Load of nothing = %v", err)
	}
}

func TestLargeFiles(t *testing.T) {
	var bomb bytes.Buffer
	bomb.WriteString("version: 1\na0: &a0 [x,x,x,x,x,x,x,x,x]\n")
	for i := 1; i < 9; i++ {
		fmt.Fprintf(&bomb, "a%d: &a%d [*a%d,*a%d,*a%d,*a%d,*a%d,*a%d,*a%d,*a%d,*a%d]\n", i, i, i-1, i-1, i-1, i-1, i-1, i-1, i-1, i-1, i-1)
	}
	if _, err := Parse("p.yaml", bomb.Bytes()); err == nil || !strings.Contains(err.Error(), "p.yaml:2: anchor &a0: a policy file has no anchors") {
		t.Errorf("Parse of an alias bomb = %v", err)
	}
	big := bytes.Repeat([]byte("a: *b\n"), 50<<20/6)
	if _, err := Parse("p.yaml", big); err == nil || err.Error() != "p.yaml:1: file is larger than 8 MiB" {
		t.Errorf("Parse of 50 MB of aliases = %v", err)
	}
	deep := "version: 1\nrules: " + strings.Repeat("[", 100000)
	if _, err := Parse("p.yaml", []byte(deep)); err == nil || !strings.Contains(err.Error(), "p.yaml:") {
		t.Errorf("Parse of a deep file = %v", err)
	}
	var many strings.Builder
	many.WriteString("version: 1\nplans: {std: {rate: 1/s}}\ndefault_plan: std\nrules:\n" + guardRule + "  - {name: contract, layer: contract, key: [tenant], limit: plan}\ntenants:\n")
	for i := range 20000 {
		fmt.Fprintf(&many, "  tenant-%d: {plan: std, burst: %d}\n", i, i+1)
	}
	p := mustParse(t, many.String())
	if l, _ := p.TenantLimit("tenant-19999"); len(p.Tenants) != 20000 || l.Burst != 20000 {
		t.Errorf("%d tenants, limit %+v", len(p.Tenants), l)
	}
}

// What the policy says in a warning.
func TestWarnings(t *testing.T) {
	p := mustParse(t, "version: 1\nplans: {std: {rate: 1/s, quota: {limit: 5, per: day}}}\nrules:\n  - {name: g, layer: guard, rate: 0}\n"+
		"  - {name: try, layer: contract, key: [ip], rate: 1/s, mode: shadow, consistency: strict, on_store_loss: deny}\n"+
		"  - {name: say, layer: contract, key: [ip], rate: 1/s, mode: shadow, consistency: local, on_store_loss: local}\n")
	want := []string{
		"rule try is in mode shadow: its on_store_loss has no effect until mode is enforce",
		"rule try is in mode shadow: it is kept by shares, and strict only when mode is enforce",
		"quota of plan std is recorded, not enforced by this version",
		"guard g has rate 0: it refuses every request",
		"no rule has limit: plan: the plans have no effect",
		"identity.tenant is not given: tenants are read from the header X-App-Key",
	}
	if got := p.Warnings(); !slices.Equal(got, want) {
		t.Errorf("Warnings = %q, want %q", got, want)
	}
}

func FuzzParse(f *testing.F) {
	files, err := filepath.Glob("testdata/errors/*.yaml")
	if err != nil {
		f.Fatal(err)
	}
	for _, file := range append(files, "testdata/contract.yaml") {
		data, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		p, err := Parse("f.yaml", data)
		if (p == nil) == (err == nil) {
			t.Fatalf("Parse = %v, %v", p, err)
		}
		if err != nil {
			if e, ok := errors.AsType[*Error](err); !ok || e.File != "f.yaml" || e.Line < 1 {
				t.Fatalf("error without a place: %v", err)
			}
			return
		}
		if p.Rules[0].Layer != LayerGuard || p.Rules[0].Fixed.Unlimited || p.Rules[0].Mode != Enforce ||
			p.Rules[0].OnStoreLoss != LossLocal || p.Rules[0].Consistency == Strict {
			t.Fatalf("no guard: %+v", p.Rules)
		}
	})
}
