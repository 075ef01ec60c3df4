package main

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/weirhq/weir/cmd/internal/text"
	"github.com/weirhq/weir/limits"
)

func checkCommand() *cobra.Command {
	var path string
	var out output
	cmd := &cobra.Command{
		Use:     "check",
		Short:   "Validate a policy and exit: every mistake at once, with file and line",
		Example: "  weir check --policy policy.yaml",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := errors.Join(out.validate(), required("--policy", path)); err != nil {
				return err
			}
			p, err := limits.Load(path)
			if err != nil {
				return err
			}
			for _, w := range p.Warnings() {
				text.Printf(cmd.ErrOrStderr(), "policy: %s\n", w)
			}
			v := struct {
				Version string `json:"version"`
				Rules   int    `json:"rules"`
				Routes  int    `json:"routes"`
				Plans   int    `json:"plans"`
				Tenants int    `json:"tenants"`
			}{fmt.Sprintf("%012x", p.Version), len(p.Rules), len(p.Routes), len(p.Plans), len(p.Tenants)}
			return out.write(cmd.OutOrStdout(), v, func(w io.Writer) {
				text.Printf(w, "POLICY\tRULES\tROUTES\tPLANS\tTENANTS\n%s\t%d\t%d\t%d\t%d\n", v.Version, v.Rules, v.Routes, v.Plans, v.Tenants)
			})
		},
	}
	bind(cmd, map[string]*string{"policy": &path})
	out.bind(cmd)
	return cmd
}
