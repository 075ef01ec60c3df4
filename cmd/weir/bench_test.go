package main

import (
	"strings"
	"testing"
)

// TestBenchAccuracySaysWhatIsWrongAtOnce: a mistake on the command line is a usage error that names what there is, before anything runs.
func TestBenchAccuracySaysWhatIsWrongAtOnce(t *testing.T) {
	for _, c := range []struct{ flags, want string }{
		{"--scenario nope", "flash-crowd"}, {"--mode nope", "lease"}, {"--scenario=", "--scenario is empty"}, {"--mode=", "--mode is empty"},
		{"--scenario step,", "--scenario is empty"}, {"--sim --live", "not both"},
		{"--whole", "--live"}, {"--sim --rivals ../../internal/bench", "--live"}, {"--log-level debug", "--live"},
		{"--live --rivals /nowhere", "/nowhere"}, {"--live --rivals=", "--rivals"}, {"--seed 0", "--seed"},
		{"--scenario step --svg x --doc y", "--doc"}, {"--live --svg x --doc y", "--doc"},
		{"--live --scenario nope", "moving-hotspot"}, {"--live --scenario clocks", "moving-hotspot"}, {"--live --mode nope", "lease, strict"},
	} {
		out, stderr, code := weir(t, append([]string{"bench", "accuracy"}, strings.Fields(c.flags)...)...)
		if code != exitUsage || out != "" || !strings.Contains(stderr, c.want) {
			t.Errorf("bench accuracy %s: exit %d, %q, %q, want a usage error with %q", c.flags, code, out, stderr, c.want)
		}
	}
}
