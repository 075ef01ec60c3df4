package clickhouse

import (
	"cmp"
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	ch "github.com/ClickHouse/clickhouse-go/v2"
)

//go:embed migrations/*.sql
var migrationFiles embed.FS

// migration is one file of migrations: NNNN_name.sql, numbered from 1 without gaps. A file never changes once released,
// and its statements are idempotent, for a migration that was cut off is done again from its start, and what is made of a
// table when the table is gone.
type migration struct {
	version    uint32
	name       string
	checksum   string
	statements []string
}

// migrations are the embedded ones, in order.
func migrations() ([]migration, error) {
	names, err := fs.Glob(migrationFiles, "migrations/*.sql")
	if err != nil {
		return nil, err
	}
	var out []migration
	for _, file := range names {
		text, err := migrationFiles.ReadFile(file)
		if err != nil {
			return nil, err
		}
		name := strings.TrimSuffix(strings.TrimPrefix(file, "migrations/"), ".sql")
		number, _, _ := strings.Cut(name, "_")
		v, err := strconv.ParseUint(number, 10, 32)
		if err != nil {
			return nil, fmt.Errorf("migration %s: its name does not begin with a number", file)
		}
		sum := sha256.Sum256(text)
		out = append(out, migration{uint32(v), name, hex.EncodeToString(sum[:]), statements(string(text))})
	}
	slices.SortFunc(out, func(a, b migration) int { return cmp.Compare(a.version, b.version) })
	for i, m := range out {
		if m.version != uint32(i+1) {
			return nil, fmt.Errorf("migration %s: want number %d", m.name, i+1)
		}
	}
	return out, nil
}

// statements splits text after each ';' that ends a line. Inside of a statement no line ends so.
func statements(text string) []string {
	var out []string
	for _, s := range strings.Split(text+"\n", ";\n") {
		if s = strings.TrimSpace(s); s != "" {
			out = append(out, s)
		}
	}
	return out
}

// columnLine finds a column in a CREATE TABLE statement: its name, and its definition with the name.
var columnLine = regexp.MustCompile(`(?m)^    (([a-z_]+) .+?),?$`)

// again are its statements, and after each that makes a table, one for each column of it that somebody may have dropped: at its place.
func (m migration) again() []string {
	var out []string
	for _, sql := range m.statements {
		out = append(out, sql)
		if !strings.Contains(sql, "CREATE TABLE ") {
			continue
		}
		place := " FIRST"
		for _, c := range columnLine.FindAllStringSubmatch(sql, -1) {
			out = append(out, "ALTER TABLE "+objectOf(sql).table+" ADD COLUMN IF NOT EXISTS "+c[1]+place)
			place = " AFTER " + c[2]
		}
	}
	return out
}

// made finds what a statement makes: a table or a view, or a column or a projection of one. Any other only changes how one works.
var made = regexp.MustCompile(`(?m)^(?:CREATE (?:TABLE|VIEW|MATERIALIZED VIEW) IF NOT EXISTS|ALTER TABLE) (\w+)(?: ADD (COLUMN|PROJECTION) IF NOT EXISTS (\w+))?`)

// object is what a statement makes or changes.
type object struct {
	table  string // or view
	kind   string // of what it adds to it: COLUMN or PROJECTION, else empty
	column string // or projection
}

func objectOf(sql string) object {
	m := made.FindStringSubmatch(sql)
	if m == nil {
		return object{}
	}
	return object{m[1], m[2], m[3]}
}

func (o object) String() string {
	if o.kind != "" {
		return o.table + "." + o.column
	}
	return o.table
}

// in says whether it is there, by the CREATE statement of its table.
func (o object) in(create string) bool {
	switch o.kind {
	case "COLUMN":
		return strings.Contains(create, "`"+o.column+"` ")
	case "PROJECTION":
		return strings.Contains(create, "PROJECTION "+o.column+" ")
	}
	return create != ""
}

// lost says what went with it and is not made again: empty for what is made of other tables, by the server or by a rebuild.
func (o object) lost() string {
	switch {
	case o.kind == "PROJECTION", o == object{"tokens", "COLUMN", "rate"}, strings.HasSuffix(o.table, "_mv"), o.table == "corrected_1h", slices.ContainsFunc(rollups, func(t rollup) bool { return t.name == o.table }):
		return ""
	case o == object{table: "corrections"}:
		return ", and what it held is lost: invoices lack it until each correction is made again"
	case o == object{table: "usage"}, o.table == "usage" && slices.Contains([]string{"route", "rule", "allowed", "rejected", "cost"}, o.column):
		return ", and what it held is lost: the roll-ups have the last of it, and invoices are made from them"
	}
	return ", and what it held is lost"
}

// counts says whether it holds what was counted: a part of the ledger, or of a roll-up.
func (o object) counts() bool {
	return o.kind != "PROJECTION" && (o.table == "usage" || o.table == "reports" || slices.ContainsFunc(rollups, func(t rollup) bool { return t.name == o.table }))
}

// madeAgain is the row of schema_migrations that says when something that counts was last made again: there is no such migration.
const madeAgain = 0

// noteRemade is done before it is made. Errors of both are the driver's.
func (s *Store) noteRemade(ctx context.Context) error {
	return s.conn.Exec(ctx, "INSERT INTO schema_migrations (version, name) SETTINGS async_insert = 0 SELECT {version:UInt32}, 'made again'", ch.Named("version", uint32(madeAgain)))
}

// remade is when something that counts was last made again; 1970 when nothing was.
func (s *Store) remade(ctx context.Context) (t time.Time, err error) {
	err = s.conn.QueryRow(ctx, "SELECT max(applied) FROM schema_migrations WHERE version = {version:UInt32}", ch.Named("version", uint32(madeAgain))).Scan(&t)
	return t, err
}

// aType is a type of ClickHouse, three parentheses deep.
const aType = `\w+(?:\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))?`

// added finds the definition of the column that a statement adds, less its name, and its type; columnType finds the type alone, where it begins.
var (
	added      = regexp.MustCompile(`(?m)^ALTER TABLE \w+ ADD COLUMN IF NOT EXISTS \w+ +((` + aType + `).*?)(?: FIRST| AFTER \w+)?$`)
	columnType = regexp.MustCompile("^" + aType)
)

// flaw is something that is there, and not as these migrations have made it.
type flaw struct {
	object
	says string // what it is, and what to do
	cure string // of a view, which holds nothing: makes it what it was. Else empty
}

var comment = regexp.MustCompile(` COMMENT '(?:[^'\\]|\\.|'')*'`)

// uncommented is a CREATE statement, as the server tells it, without comments, which are anybody's.
func uncommented(create string) string { return comment.ReplaceAllString(create, "") }

// look says which of all migrations' things are not there, and which are not as they were made, as far as they are applied. What a newer
// weir may have changed is not judged. Errors are the driver's.
func (s *Store) look(ctx context.Context, all []migration, applied map[uint32]string) (lacking []object, flaws []flaw, err error) {
	creates := map[string]string{}
	if err := s.each(ctx, "SELECT name, create_table_query FROM system.tables WHERE database = currentDatabase()", func(name, create string) { creates[name] = uncommented(create) }); err != nil {
		return nil, nil, err
	}
	for _, m := range all {
		if applied[m.version] == "" {
			continue
		}
		for _, sql := range m.again() {
			o := objectOf(sql)
			create := creates[o.table]
			switch {
			case !o.in(create):
				if !slices.Contains(lacking, object{table: o.table}) {
					lacking = append(lacking, o)
				}
			case newest(applied) > uint32(len(all)):
			case o.kind == "COLUMN":
				_, rest, _ := strings.Cut(create, "`"+o.column+"` ")
				is, want := columnType.FindString(rest), added.FindStringSubmatch(sql)
				if is != want[2] {
					flaws = append(flaws, flaw{o, fmt.Sprintf("%s is %s and should be %s: ALTER TABLE %s MODIFY COLUMN %s %s", o, is, want[2], o.table, o.column, want[1]), ""})
				}
			case strings.Contains(sql, " VIEW IF NOT EXISTS "):
				f, err := s.otherView(ctx, o, create, sql)
				if err != nil {
					return nil, nil, err
				}
				if f != nil {
					flaws = append(flaws, *f)
				}
			}
		}
	}
	if len(lacking) == 0 {
		return nil, flaws, nil
	}
	detached := map[string]bool{}
	err = s.each(ctx, "SELECT table, database FROM system.detached_tables WHERE database = currentDatabase()", func(name, _ string) { detached[name] = true })
	if _, ok := errors.AsType[*ch.Exception](err); err != nil && !ok { // else the server is too old to say, or will not
		return nil, nil, err
	}
	lacking = slices.DeleteFunc(lacking, func(o object) bool {
		if o.kind == "" && detached[o.table] {
			flaws = append(flaws, flaw{o, fmt.Sprintf("%s is detached, with all that it holds: ATTACH TABLE %s", o, o), ""})
			return true
		}
		return false
	})
	return lacking, flaws, nil
}

// incidental is what may differ in the CREATE statement of a view before what it selects.
var incidental = regexp.MustCompile(` IF NOT EXISTS| \(.*\)| DEFINER = \S+| SQL SECURITY \w+`)

// otherView is nil when the view that create says is the one that sql makes. The server writes both the same way before they are compared.
func (s *Store) otherView(ctx context.Context, o object, create, sql string) (*flaw, error) {
	var is, want string
	if err := s.conn.QueryRow(ctx, "SELECT formatQuerySingleLine({is:String}), formatQuerySingleLine({want:String})", ch.Named("is", create), ch.Named("want", sql)).Scan(&is, &want); err != nil {
		return nil, err
	}
	split := func(text string) (head, query string) {
		db := s.opt.Auth.Database
		head, query, _ = strings.Cut(strings.NewReplacer("`"+db+"`.", "", db+".", "").Replace(text), " AS SELECT ")
		return incidental.ReplaceAllString(head, ""), query
	}
	isHead, isQuery := split(is)
	head, query := split(want)
	switch {
	case isHead != head:
		return &flaw{o, fmt.Sprintf("%s is no view of the kind that it was: see what it holds, DROP TABLE %s, and run weir migrate", o, o), ""}, nil
	case isQuery == query:
		return nil, nil
	}
	cure := "CREATE OR REPLACE VIEW " + o.table + " AS SELECT " + query
	if strings.HasPrefix(head, "CREATE MATERIALIZED ") {
		cure = "ALTER TABLE " + o.table + " MODIFY QUERY SELECT " + query
	}
	return &flaw{o, fmt.Sprintf("%s selects something else than it did: run weir migrate", o), cure}, nil
}

// flawed is the error about flaws, and things that are lacking, of which there may be none; nil if there are none of either.
func (s *Store) flawed(lacking []object, flaws []flaw) error {
	var says []string
	if len(lacking) > 0 {
		var names []string
		for _, o := range lacking {
			names = append(names, o.String())
		}
		says = append(says, "lacks "+strings.Join(names, ", ")+": run weir migrate")
	}
	if len(flaws) > 0 {
		var all []string
		for _, f := range flaws {
			all = append(all, f.says)
		}
		says = append(says, "is not as it was made: "+strings.Join(all, "; "))
	}
	if says == nil {
		return nil
	}
	return &Error{Kind: ErrSchemaIncomplete, Err: ErrSchemaIncomplete, Line: s.schemaAt() + " " + strings.Join(says, ", and ")}
}

// schemaAt begins what is said of the schema.
func (s *Store) schemaAt() string {
	return fmt.Sprintf("ClickHouse at %s: the schema in database %q", strings.Join(s.opt.Addr, ","), s.opt.Auth.Database)
}

const migrationsTable = `CREATE TABLE IF NOT EXISTS schema_migrations
(
    version  UInt32,
    name     String,
    checksum String,
    applied  DateTime64(3, 'UTC') DEFAULT now64(3, 'UTC')
)
ENGINE = ReplacingMergeTree
ORDER BY version
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1`

// Migrate brings the schema up to this build, database included, and makes again what of it is gone, and views that select something else.
// It tells progress one line per migration and per thing made again. It may run any number of times, and beside itself. It never goes
// back: a schema newer than this build stays so. What would take data to put right, a column of another type or a table that is detached,
// is an error that says the statement for it, and nothing is done then.
func (s *Store) Migrate(ctx context.Context, progress func(string)) error {
	if err := s.createDatabase(ctx); err != nil {
		return err
	}
	if err := s.conn.Exec(ctx, migrationsTable); err != nil {
		return s.explain("create schema_migrations", err)
	}
	all, err := migrations()
	if err != nil {
		return err
	}
	applied, err := s.applied(ctx)
	if err != nil {
		return s.explain("read schema_migrations", err)
	}
	lacking, flaws, err := s.look(ctx, all, applied)
	if err != nil {
		return s.explain("look what is there", err)
	}
	if left := slices.DeleteFunc(slices.Clone(flaws), func(f flaw) bool { return f.cure != "" }); len(left) > 0 {
		return s.flawed(nil, left)
	}
	gone := map[string]bool{} // tables of which something is lacking: all that is said of one is said again
	for _, o := range lacking {
		gone[o.table] = true
		progress("making " + o.String() + " again, which is gone" + o.lost())
	}
	if slices.ContainsFunc(lacking, object.counts) {
		if err := s.noteRemade(ctx); err != nil {
			return s.explain("note what is made again", err)
		}
	}
	for _, m := range all {
		sum, ok := applied[m.version]
		if ok && sum != m.checksum {
			return s.changed(m)
		}
		if !ok {
			progress("applying " + m.name)
		}
		statements := m.statements
		if ok {
			statements = slices.DeleteFunc(m.again(), func(sql string) bool { return !gone[objectOf(sql).table] })
		}
		for i, sql := range statements {
			if err := s.conn.Exec(ctx, sql); err != nil {
				return s.explain(fmt.Sprintf("migration %s, statement %d of %d", m.name, i+1, len(statements)), err)
			}
		}
		if ok {
			continue
		}
		if err := s.conn.Exec(ctx, "INSERT INTO schema_migrations (version, name, checksum) SETTINGS async_insert = 0 SELECT {version:UInt32}, {name:String}, {checksum:String}",
			ch.Named("version", m.version), ch.Named("name", m.name), ch.Named("checksum", m.checksum)); err != nil {
			return s.explain("note migration "+m.name, err)
		}
	}
	for _, f := range flaws {
		progress("making " + f.String() + " again, which selected something else")
		if err := s.conn.Exec(ctx, f.cure); err != nil {
			return s.explain("make "+f.String()+" again", err)
		}
		gone[f.table] = true
	}
	for _, t := range rollups {
		if slices.ContainsFunc(lacking, func(o object) bool { return o.table == t.name && o.counts() }) || gone[t.name+"_mv"] {
			progress(t.name + " lacks what it had, or what came in meanwhile: weir history rebuild --from 1970-01-01T00:00:00Z fills it from usage")
		}
	}
	fading, err := s.fading(ctx)
	if err != nil {
		return s.explain("look for what is deleted by age", err)
	}
	for _, line := range fading {
		progress("warning: " + line)
	}
	progress(fmt.Sprintf("the schema is at %d", max(uint32(len(all)), newest(applied))))
	return nil
}

// createDatabase works from the default database, since a connection to one that is missing cannot be made.
func (s *Store) createDatabase(ctx context.Context) error {
	opt := *s.opt
	opt.Auth.Database = ""
	conn, err := ch.Open(&opt)
	if err != nil {
		return fmt.Errorf("open ClickHouse: %w", err)
	}
	err = conn.Exec(ctx, "CREATE DATABASE IF NOT EXISTS {name:Identifier}", ch.Named("name", s.opt.Auth.Database))
	return s.explain("create database "+s.opt.Auth.Database, errors.Join(err, conn.Close()))
}

// applied are the checksums of the applied migrations, by version. Errors are the driver's.
func (s *Store) applied(ctx context.Context) (map[uint32]string, error) {
	rows, err := s.conn.Query(ctx, "SELECT version, checksum FROM schema_migrations FINAL")
	if err != nil {
		return nil, err
	}
	out := map[uint32]string{}
	var version uint32
	var sum string
	for rows.Next() {
		if err := rows.Scan(&version, &sum); err != nil {
			return nil, errors.Join(err, rows.Close())
		}
		out[version] = sum
	}
	return out, errors.Join(rows.Err(), rows.Close())
}

func newest(applied map[uint32]string) (v uint32) {
	for n := range applied {
		v = max(v, n)
	}
	return v
}

func (s *Store) changed(m migration) error {
	return &Error{Kind: ErrSchema, Err: ErrSchema, Line: fmt.Sprintf(
		"ClickHouse at %s: migration %s was applied with other text than this weir has: the schema in database %q is not its own", strings.Join(s.opt.Addr, ","), m.name, s.opt.Auth.Database)}
}

// ErrSchemaNewer is an ErrSchema: the schema was migrated by a newer weir. Migrations only add, so inserts and queries
// of this one still work: a process may go on with a warning.
var ErrSchemaNewer = fmt.Errorf("%w: it is newer", ErrSchema)

// ErrSchemaIncomplete is an ErrSchema: it was migrated, and a part of it is gone, or hidden from the user, or not as it was made. What needs
// that part fails until it is as it was, and no other: a process may go on with a warning.
var ErrSchemaIncomplete = fmt.Errorf("%w: a part of it is gone, or another", ErrSchema)

// Check says in one line why this build cannot rely on the schema: it is missing, older, changed (ErrSchema), not all there or as it
// was made (ErrSchemaIncomplete) or newer (ErrSchemaNewer), or the server cannot be asked (ErrUnreachable, ErrDenied).
func (s *Store) Check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	all, err := migrations()
	if err != nil {
		return err
	}
	applied, err := s.applied(ctx)
	if err != nil {
		return s.explain("check the schema", err)
	}
	at := s.schemaAt()
	for _, m := range all {
		switch sum, ok := applied[m.version]; {
		case !ok:
			return &Error{Kind: ErrSchema, Err: ErrSchema, Line: fmt.Sprintf("%s is at %d and this weir wants %d: run weir migrate", at, m.version-1, len(all))}
		case sum != m.checksum:
			return s.changed(m)
		}
	}
	lacking, flaws, err := s.look(ctx, all, applied)
	if err != nil {
		return s.explain("check the schema", err)
	}
	if err := s.flawed(lacking, flaws); err != nil {
		return err
	}
	if v := newest(applied); v > uint32(len(all)) {
		return &Error{Kind: ErrSchemaNewer, Err: ErrSchemaNewer, Line: fmt.Sprintf("%s is at %d, newer than this weir (%d): it was migrated by a newer one", at, v, len(all))}
	}
	return nil
}
