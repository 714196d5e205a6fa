package vmm

// Look is what Mapping.Host does once it holds the mapping.
func Look(m *Mapping) error {
	v, err := m.m.View("test", &m.closer.Life)
	if err == nil {
		m.m.Range.Views.Close(v)
	}
	return err
}
