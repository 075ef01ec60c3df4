package e2e

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"path"
	"strings"
	"testing"
)

const module = "github.com/weirhq/weir/"

// rules is the package map: a package (the longest matching prefix counts) and what of weir it may import, besides its
// own sub-packages. Arrows run downward only.
var rules = []struct {
	pkg string
	may []string
}{
	{"enforcer/bucket", nil}, // the arithmetic: standard library only
	{"schemas", nil},
	{"limits", []string{"schemas", "enforcer/bucket"}},
	{"internal/embedded", []string{"internal/embedded"}},
	{"internal", []string{"schemas"}},
	{"enforcer/httpguard", []string{"enforcer", "limits", "schemas", "internal"}},
	{"enforcer/natsfeed", []string{"enforcer", "schemas", "internal"}},
	{"enforcer", []string{"limits", "schemas"}},
	{"ingest/jetstream", []string{"ingest", "schemas", "internal"}},
	{"ingest/spool", []string{"ingest", "schemas"}},
	{"ingest", []string{"schemas"}},
	{"aggregator/redis", []string{"aggregator", "schemas", "internal"}},
	{"aggregator/clickhouse", []string{"aggregator", "schemas", "internal"}},
	{"aggregator/natscast", []string{"aggregator", "schemas", "internal"}},
	{"aggregator/aggregatortest", []string{"aggregator", "schemas"}},
	{"aggregator", []string{"schemas"}},
	{"alerting/webhook", []string{"alerting", "schemas", "internal"}},
	{"alerting/natsfeed", []string{"alerting", "schemas", "internal"}},
	{"alerting", []string{"schemas"}},
	{"cmd", []string{"cmd", "enforcer", "limits", "ingest", "aggregator", "alerting", "schemas", "internal", "deploy"}},
	{"deploy", nil},
}

// TestPackagesKeepToTheMap reads the imports that the compiler sees.
func TestPackagesKeepToTheMap(t *testing.T) {
	cmd := exec.Command("go", "list", "-json=ImportPath,Imports", "./...")
	cmd.Dir = "../.."
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	seen := 0
	for dec := json.NewDecoder(out); ; seen++ {
		var p struct {
			ImportPath string
			Imports    []string
		}
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		pkg := strings.TrimPrefix(p.ImportPath, module)
		may, ok := allowed(pkg)
		if !ok {
			t.Errorf("package %s has no place in the map", pkg)
			continue
		}
		for _, imp := range p.Imports {
			dep, ours := strings.CutPrefix(imp, module)
			if ours && !under(dep, pkg) && !anyUnder(dep, may) {
				t.Errorf("%s imports %s, which the map does not allow", pkg, dep)
			}
			if pkg == "enforcer/bucket" && strings.Contains(strings.Split(imp, "/")[0], ".") {
				t.Errorf("%s imports %s, want the standard library only", pkg, imp)
			}
		}
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if seen < 10 {
		t.Errorf("looked at %d packages, want all of them", seen)
	}
}

func allowed(pkg string) ([]string, bool) {
	best := -1
	for i, r := range rules {
		if under(pkg, r.pkg) && (best < 0 || len(r.pkg) > len(rules[best].pkg)) {
			best = i
		}
	}
	if best < 0 {
		return nil, false
	}
	return rules[best].may, true
}

func under(pkg, root string) bool { return pkg == root || strings.HasPrefix(pkg, path.Clean(root)+"/") }

func anyUnder(pkg string, roots []string) bool {
	for _, r := range roots {
		if under(pkg, r) {
			return true
		}
	}
	return false
}
