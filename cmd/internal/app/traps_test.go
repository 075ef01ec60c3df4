package app

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Every test that docs/traps.md names exists, and every trap from T1 to T20 names one.
func TestTrapsAreTested(t *testing.T) {
	const root = "../../.."
	page, err := os.ReadFile(filepath.Join(root, "docs", "traps.md"))
	if err != nil {
		t.Fatal(err)
	}
	var tests strings.Builder
	if err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		b, err := os.ReadFile(path)
		tests.Write(b)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	traps := 0
	for line := range strings.Lines(string(page)) {
		names := regexp.MustCompile("`(Test[A-Za-z0-9]+)`").FindAllStringSubmatch(line, -1)
		for _, name := range names {
			if !strings.Contains(tests.String(), "\nfunc "+name[1]+"(") {
				t.Errorf("there is no %s", name[1])
			}
		}
		if regexp.MustCompile(`^\| T\d+ `).MatchString(line) {
			if traps++; len(names) == 0 {
				t.Errorf("no test in %q", line)
			}
		}
	}
	if traps != 20 {
		t.Errorf("%d traps, want 20", traps)
	}
}
