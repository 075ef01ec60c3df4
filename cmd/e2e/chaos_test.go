package e2e

import (
	"bytes"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
)

// TestChaos is the short run of `make chaos`: three seeds, every part killed, frozen and cut off, nothing lost or doubled.
func TestChaos(t *testing.T) {
	chaos := filepath.Join(t.TempDir(), "chaos")
	if out, err := exec.Command("go", "build", "-o", chaos, "../chaos").CombinedOutput(); err != nil {
		t.Fatalf("build chaos: %v\n%s", err, out)
	}
	cmd := exec.Command(chaos, "-weir", binary, "-seeds", "3")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	t.Logf("%s", out.String())
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	want := regexp.MustCompile(`^chaos: seeds 3, requests [1-9][0-9]{2,}, unanswered [0-9]+, lost 0, doubled 0$`)
	if last := lines[len(lines)-1]; err != nil || !want.MatchString(last) {
		t.Errorf("chaos: %v; its last line is %q, want %s", err, last, want)
	}
}
