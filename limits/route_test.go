package limits

import (
	"fmt"
	"net/netip"
	"path"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

const routeHead = "version: 1\nrules:\n" + guardRule + "routes:\n"

func TestRoute(t *testing.T) {
	p := mustParse(t, routeHead+`
  - {name: export, match: {methods: [GET, HEAD], path: /report/export/**}}
  - {name: report, match: {path: /report/**}}
  - {name: exact, match: {path: /a/b}}
  - {name: slash, match: {path: /a/b/}}
  - {name: star, match: {path: /a/*/c}}
  - {name: starend, match: {path: /s/*}}
  - {name: deepstar, match: {path: /d/*/x/**}}
  - {name: root, match: {path: /}}
`)
	for _, c := range []struct{ method, path, want string }{
		{"GET", "/report/export", "export"},
		{"GET", "/report/export/", "export"},
		{"GET", "/report/export/2026/x", "export"},
		{"POST", "/report/export/2026", "report"},
		{"get", "/report/export/2026", "report"},
		{"GET", "/report/exports", "report"},
		{"GET", "/reports", "other"},
		{"GET", "/report", "report"},
		{"GET", "/report/export?x=/a/b", "export"},
		{"GET", "/x?p=/report/export", "other"},
		{"GET", "/a/b", "exact"},
		{"GET", "/a/b/", "slash"},
		{"GET", "/a/b/c", "star"},
		{"GET", "/a//c", "other"}, // is /a/c
		{"GET", "/a/c", "other"},
		{"GET", "/a/x/y/c", "other"},
		{"GET", "/s/", "other"},
		{"GET", "/s/x", "starend"},
		{"GET", "/s/x/", "other"},
		{"GET", "/d/1/x", "deepstar"},
		{"GET", "/d/1/x/2/3", "deepstar"},
		{"GET", "/d/x", "other"},
		{"GET", "/", "root"},
		{"GET", "", "root"},
		{"GET", "?x", "root"},
		{"GET", "//", "root"},
		{"GET", "/..", "root"},
		{"GET", "http://example.com/a/b?x", "exact"},
		{"GET", "http://example.com", "root"},
		{"OPTIONS", "*", "other"},
		{"CONNECT", "example.com:443", "other"},
	} {
		if got := p.Route(c.method, c.path); got != c.want {
			t.Errorf("Route(%s, %s) = %s, want %s", c.method, c.path, got, c.want)
		}
	}
}

func TestB062SpellingsOfOnePath(t *testing.T) {
	p := mustParse(t, routeHead+"  - {name: x, match: {path: /v1/x}}\n  - {name: deep, match: {path: /v2/x/**}}\n")
	for _, spelling := range []string{"/v1/x", "/v1//x", "/v1/./x", "/v1/%78", "//v1/x", "/./v1/x", "/v1/y/../x", "/../v1/x", "/v1%2Fx", "/v1/%2e/x", "/v1/y/%2E%2e/x", "/%76%31/x", "/v1/x?y=1", "/v1/x?%zz"} {
		if got := p.Route("GET", spelling); got != "x" {
			t.Errorf("Route(%s) = %s, want x", spelling, got)
		}
	}
	for _, spelling := range []string{"/v2/x/%zz", "/v2//x/%", "/v2/./x/%7", "/v2/x/a%2"} { // malformed: matched as it is
		if got := p.Route("GET", spelling); got != "deep" {
			t.Errorf("Route(%s) = %s, want deep", spelling, got)
		}
	}
	for _, other := range []string{"/V1/x", "/v1/X", "/v1/x/", "/v1/%2578", "/v1/%78%zz", "/v1/..x", "/v1/x/.", "/v1/x;a"} {
		if got := p.Route("GET", other); got != OtherRoute {
			t.Errorf("Route(%s) = %s, want other", other, got)
		}
	}
}

// The normal form is what package path makes of it, but for a slash at the end, which is kept.
func TestNormalFormTwin(t *testing.T) {
	segment := rapid.SampledFrom([]string{"", ".", "..", "...", "a", "b", "c.d", "..e", "é", "*", "%"})
	rapid.Check(t, func(t *rapid.T) {
		p := "/" + strings.Join(rapid.SliceOfN(segment, 0, 8).Draw(t, "segments"), "/")
		want := path.Clean(p)
		if last := p[strings.LastIndexByte(p, '/')+1:]; (last == "" || last == "." || last == "..") && want != "/" {
			want += "/"
		}
		if got := string(appendNormal(nil, p)); got != want {
			t.Fatalf("appendNormal(%q) = %q, want %q", p, got, want)
		}
		var escaped strings.Builder
		for i := range len(p) {
			fmt.Fprintf(&escaped, "%%%02x", p[i])
		}
		if got := string(appendNormal(nil, "/"+escaped.String())); got != want {
			t.Fatalf("appendNormal(%q) = %q, want %q", escaped.String(), got, want)
		}
	})
}

func FuzzRoute(f *testing.F) {
	p := mustParse(f, routeHead+"  - {name: x, match: {path: /v1/*/x/**}}\n")
	f.Add("GET", "/v1/%2e%2e/%")
	f.Fuzz(func(t *testing.T, method, path string) {
		p.Route(method, path)
		clean := appendNormal(nil, path)
		if strings.HasPrefix(path, "/") && !strings.ContainsAny(string(clean), "%?") {
			if again := string(appendNormal(nil, string(clean))); again != string(clean) {
				t.Errorf("normal form of %q is %q, and of that %q", path, clean, again)
			}
		}
	})
}

func TestHotPathAllocatesNothing(t *testing.T) {
	p := mustParse(t, routeHead+`
  - {name: export, match: {methods: [GET], path: /report/export/**}}
  - {name: star, match: {path: /a/*/c}}
plans: {std: {rate: 1/s}, gold: {rate: 2/s}}
tenants: {acme: {plan: gold}}
default_plan: std
`)
	byPlan := Rule{ByPlan: true}
	long := "/report/" + strings.Repeat("x/../", 190) + "export/%78"
	var addr = netip.MustParseAddr("2001:db8::1")
	n := testing.AllocsPerRun(100, func() {
		for _, path := range []string{"/report/export/2026", "/a//./%78/c?y", "/none", long} {
			p.Route("GET", path)
		}
		byPlan.Limit(p, "acme")
		byPlan.Limit(p, "nobody")
		p.Identity.Mask(addr)
		p.Identity.Trusted(addr)
	})
	if n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
	if got := p.Route("GET", long); got != "export" {
		t.Errorf("Route(long) = %s, want export", got)
	}
}

func TestB022ForwardedFor(t *testing.T) {
	p := mustParse(t, "version: 1\nidentity: {tenant: {client_ip: true}, trusted_proxies: [10.0.0.1, 2001:db8:ffff::/48, 192.168.0.0/16]}\nrules:\n"+guardRule)
	for _, c := range []struct {
		remote    string
		forwarded []string
		want      string
	}{
		{"10.0.0.1", []string{"1.2.3.4, 198.51.100.7"}, "198.51.100.7"},
		{"10.0.0.2", []string{"1.2.3.4, 198.51.100.7"}, "10.0.0.2"},
		{"203.0.113.9", []string{"1.2.3.4"}, "203.0.113.9"},
		{"10.0.0.1", []string{"198.51.100.7, garbage"}, "10.0.0.1"},
		{"10.0.0.1", []string{"198.51.100.7, "}, "10.0.0.1"},
		{"10.0.0.1", []string{"1.2.3.4", "198.51.100.7"}, "198.51.100.7"},
		{"10.0.0.1", []string{"1.2.3.4, 198.51.100.7", "192.168.3.4"}, "198.51.100.7"},
		{"10.0.0.1", []string{"198.51.100.7:4711"}, "198.51.100.7"},
		{"10.0.0.1", []string{"[2001:db8::7]:4711"}, "2001:db8::7"},
		{"10.0.0.1", []string{"[2001:db8::7]"}, "2001:db8::7"},
		{"::ffff:10.0.0.1", []string{"198.51.100.7"}, "198.51.100.7"},
		{"2001:db8:ffff::1", []string{"198.51.100.7"}, "198.51.100.7"},
		{"10.0.0.1", []string{"192.168.3.4, 192.168.3.5"}, "192.168.3.4"},
		{"10.0.0.1", nil, "10.0.0.1"},
		{"10.0.0.1", []string{""}, "10.0.0.1"},
		{"10.0.0.1", []string{"198.51.100.7,,"}, "10.0.0.1"},
	} {
		if got := p.Identity.ClientIP(netip.MustParseAddr(c.remote), c.forwarded); got.String() != c.want {
			t.Errorf("ClientIP(%s, %q) = %s, want %s", c.remote, c.forwarded, got, c.want)
		}
	}
}

func TestMask(t *testing.T) {
	id := Identity{IPv6Prefix: 64}
	for in, want := range map[string]string{
		"198.51.100.7": "198.51.100.7", "::ffff:198.51.100.7": "198.51.100.7", "2001:db8:1:2:3:4:5:6": "2001:db8:1:2::", "fe80::1%eth0": "fe80::",
	} {
		if got := id.Mask(netip.MustParseAddr(in)).String(); got != want {
			t.Errorf("Mask(%s) = %s, want %s", in, got, want)
		}
	}
	id.IPv6Prefix = 128
	if got := id.Mask(netip.MustParseAddr("2001:db8::1")).String(); got != "2001:db8::1" {
		t.Errorf("Mask = %s", got)
	}
	if got := id.Mask(netip.Addr{}); got.IsValid() {
		t.Errorf("Mask of no address = %s", got)
	}
}

func BenchmarkRoute(b *testing.B) {
	p := mustParse(b, routeHead+`
  - {name: export, match: {methods: [GET], path: /report/export/**}}
  - {name: orders, match: {path: /orders/**}}
  - {name: item, match: {path: /v1/*/items/*}}
`)
	for _, c := range []struct{ name, path, want string }{
		{"first", "/report/export/2026/11?full=1", "export"},
		{"last", "/v1/shop/items/42", "item"},
		{"escaped", "/v1//%73hop/./items/42", "item"},
		{"none", "/static/css/site.css", OtherRoute},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if got := p.Route("GET", c.path); got != c.want {
					b.Fatalf("Route(%s) = %s, want %s", c.path, got, c.want)
				}
			}
		})
	}
}
