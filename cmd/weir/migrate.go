package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/weirhq/weir/aggregator/clickhouse"
)

func migrateCommand() *cobra.Command {
	var s servers
	var level string
	cmd := &cobra.Command{
		Use:     "migrate",
		Short:   "Bring the ClickHouse schema up to this version, and make again what of it is gone",
		Example: "  weir migrate --clickhouse clickhouse://weir:secret@10.0.0.6:9000/weir",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			log, err := logger(cmd, level)
			if err != nil {
				return err
			}
			if err := s.resolve(); err != nil {
				return err
			}
			store, err := clickhouse.Open(s.clickhouse, log)
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, store.Close()) }()
			return store.Migrate(cmd.Context(), func(line string) { fmt.Fprintln(cmd.OutOrStdout(), line) })
		},
	}
	bind(cmd, map[string]*string{"log-level": &level})
	s.bind(cmd)
	return cmd
}
