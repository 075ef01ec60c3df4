package limits

import (
	"os"
	"strings"
	"testing"
)

// TestPoliciesInTheDocumentation are accepted, and say nothing that has no effect.
func TestPoliciesInTheDocumentation(t *testing.T) {
	for _, file := range []string{"../README.md", "../docs/operations.md"} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, block := range strings.Split(string(text), "```yaml\n")[1:] {
			policy, _, _ := strings.Cut(block, "```")
			if !strings.Contains(policy, "\nrules:") {
				continue
			}
			n++
			p, err := Parse(file, []byte(policy))
			if err != nil {
				t.Errorf("%v", err)
			} else if w := p.Warnings(); len(w) > 0 {
				t.Errorf("%s: %q", file, w)
			}
		}
		if n == 0 {
			t.Errorf("%s has no policy", file)
		}
	}
}
